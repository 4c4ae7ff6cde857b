"""One folder a study, and the registry of all of them."""
