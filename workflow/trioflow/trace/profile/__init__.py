"""Reading what PyTorch's profiler wrote, and joining its files into one step."""
