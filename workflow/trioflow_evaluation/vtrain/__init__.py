"""vTrain's iteration times on A100s."""
