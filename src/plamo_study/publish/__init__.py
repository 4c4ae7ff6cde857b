"""Executed notebooks, pages, and the figures of documents."""
