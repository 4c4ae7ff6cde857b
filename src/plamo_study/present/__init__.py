"""Everything a reader sees: figures, executed notebooks, published pages."""
