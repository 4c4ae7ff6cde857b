"""Bytes, FLOPs, ceilings, sizes of states."""
