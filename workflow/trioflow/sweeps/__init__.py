"""Many scenarios at once: traces x platforms x plans x batches x seeds, and the search for a plan."""
