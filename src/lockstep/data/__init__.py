"""Loads a dataset as the micro-batches of a worker's lanes. Knows nothing of gradients, messages or failures."""
