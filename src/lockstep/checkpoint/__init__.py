"""Checkpoints: written behind training, published whole or not at all, verified when read. No pickle."""
