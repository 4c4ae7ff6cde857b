"""Executed notebooks, and the pages and articles made of them."""
