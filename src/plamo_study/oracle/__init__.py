"""Independent NumPy forward pass of PLaMo 2 and PLaMo 3 from a GGUF, to hold the engine's logits against.

Written from the architecture, in float32, without caches, batches or kernels: nothing here is fast on purpose, and
nothing is shared with llama.cpp but the file. It does not know tokenizers, sampling, or rope scaling (YaRN).
"""
