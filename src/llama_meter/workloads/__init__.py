"""One module a kind of work, run in a worker."""
