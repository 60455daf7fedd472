"""Case studies: what the simulator says where nothing was measured."""
