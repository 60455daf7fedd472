"""Networks: how long messages take when they share links."""
