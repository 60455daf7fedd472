"""Real jobs whose every step was recorded: how far ranks drift apart, and how well draws say so."""
