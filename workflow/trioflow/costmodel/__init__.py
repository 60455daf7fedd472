"""Cost models: how long an operator or a collective takes that was not measured."""
