"""The program of each rank: what its stages do and the tasks that come of it, by kind of plan."""
