"""Which GGUF: the registry of shapes, synthetic files in those shapes, and what a file holds."""
