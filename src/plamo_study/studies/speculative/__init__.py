"""Notebook 08: when drafting pays, and the cost of taking a draft back in a hybrid model."""
