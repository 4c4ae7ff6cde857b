"""Notebook 10: scheduling policies: a simulator, and the engine that shows how wrong it is."""
