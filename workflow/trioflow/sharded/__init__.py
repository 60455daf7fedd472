"""Sharded steps of users, run as they were traced: no plan is made."""
