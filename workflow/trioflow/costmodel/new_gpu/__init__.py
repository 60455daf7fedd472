"""GPUs that nobody measured: the rule that carries times over, and its fit."""
