"""Your machine and your files: the write-up this study grew from."""
