"""Parallel plans: from one rank's operators to the task graph of many ranks."""
