"""The one way from a trace, a plan and a platform to a predicted step."""
