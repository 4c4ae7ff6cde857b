"""Whose activations leave the range of half precision."""
