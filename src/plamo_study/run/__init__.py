"""Papermill runs, alone and on many hosts."""
