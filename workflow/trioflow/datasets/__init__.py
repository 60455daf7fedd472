"""Public measured data: what there is, pinned, and how a file of it is retrieved."""
