"""Real training runs of language models on clusters, beside what trioflow predicts of them."""
