"""An independent NumPy forward pass of PLaMo 2 and 3, and what it proves."""
