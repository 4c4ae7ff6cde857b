"""Notebook 08: when drafting pays, and what it costs a hybrid to take a draft back."""
