"""Training of the embedded models: corpus, vocabulary, both architectures in PyTorch, export. Extra `train`."""
