"""Carries bytes between workers. The only package that calls a collective."""
