"""Plans: frozen values computed by pure functions. No torch, clock, I/O, thread or random state."""
