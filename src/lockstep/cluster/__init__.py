"""Runs on several machines: the head, the agent of each machine, and the secured connections between them. No torch."""
