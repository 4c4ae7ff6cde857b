"""Independent NumPy forward pass of PLaMo 2 and PLaMo 3 from a GGUF: the reference for the engine's logits.

Written from the architecture, in float32, without caches, batches or kernels. It is not optimised and shares nothing
with llama.cpp but the file. It does not know tokenizers, sampling, or rope scaling (YaRN).
"""
