"""Frames in, estimates and verdicts out."""
