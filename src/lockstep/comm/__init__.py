"""Carries bytes between workers. The only room that calls a collective."""
