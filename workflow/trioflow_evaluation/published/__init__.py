"""Public measured cases of many GPUs beside predictions of them."""
