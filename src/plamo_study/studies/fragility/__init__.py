"""Which tensors suffer most from fewer bits."""
