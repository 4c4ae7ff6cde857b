"""Notebook 06: what a long prompt does to everyone who is being answered, by how it is cut."""
