"""The compiled engine: arrays of records, kernels over them, and when they pay off."""
