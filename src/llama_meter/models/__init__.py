"""Any GGUF: header and shape, its check and repair, recipes of types, synthetic and embedded files."""
