"""One folder per study, and the registry of all of them."""
