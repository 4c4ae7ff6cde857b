"""Notebook 09: a prompt evaluated in one process and answered in another, by bytes, time and identity."""
