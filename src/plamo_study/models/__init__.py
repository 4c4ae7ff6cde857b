"""Model files: the registry of shapes, synthetic files in those shapes, and the contents of a GGUF."""
