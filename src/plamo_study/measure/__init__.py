"""Workloads, the process each one runs in, and the journal their rows are kept in."""
