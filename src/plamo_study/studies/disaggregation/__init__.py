"""Notebook 09: prompts prefilled in one process and decoded in another: bytes, time and identity."""
