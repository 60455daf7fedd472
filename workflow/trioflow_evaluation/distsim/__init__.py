"""DistSim's evaluation on this project's own runs."""
