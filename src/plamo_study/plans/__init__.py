"""One module a study: which cells, in order of need."""
