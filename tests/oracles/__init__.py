"""Independent ways to the same answer, for tests alone: closed forms, replays, other tools' formulas and readers."""
