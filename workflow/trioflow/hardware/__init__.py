"""Platforms: devices, links and topologies, described by files with sources."""
