"""Checkpoints: written while training continues, published completely or not at all, and verified when they are read. No pickle."""
