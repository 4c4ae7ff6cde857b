"""Notebook 10: who is served when, by policy: a simulator, and the engine that says how wrong it is."""
