"""How a worker leaves one generation and enters the next."""
