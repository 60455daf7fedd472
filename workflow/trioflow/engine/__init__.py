"""The event engine: task graph in, timeline out."""
