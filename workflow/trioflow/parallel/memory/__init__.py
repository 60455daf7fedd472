"""Memory of each rank: its allocations, their lifetimes, the peak."""
