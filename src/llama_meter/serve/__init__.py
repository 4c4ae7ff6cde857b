"""Servers: start, ask, load and probe them."""
