"""Ground truth: the same experiments run for real with torch.distributed."""
