"""Averaged gradients for training loops of the user's own: replicate() and DistributedDataParallel."""
