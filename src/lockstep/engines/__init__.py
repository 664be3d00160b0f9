"""Cluster engines: each starts one head and an agent per machine, with an address and a token. No engine knows membership."""
