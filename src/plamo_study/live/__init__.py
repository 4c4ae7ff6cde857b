"""Measure for a notebook, and for a command."""
