"""Everything that readers see: figures, executed notebooks, published pages."""
