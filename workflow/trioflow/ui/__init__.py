"""The page of ``trioflow ui``, on this machine alone; ``cli`` starts it."""
