"""The models that can be captured and measured, by family."""
