"""Any GGUF: header and shape, synthetic and embedded files, fetching, converting, checking, repairing, quantizing."""
