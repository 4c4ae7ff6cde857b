"""Notebook 06: what a long prompt does to the sequences being decoded, by how it is cut."""
