"""Averaged gradients for loops that users write themselves: replicate() and DistributedDataParallel."""
