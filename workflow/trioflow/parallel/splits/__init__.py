"""What of a model each rank holds: layers, shards, parameters, pipeline stages."""
