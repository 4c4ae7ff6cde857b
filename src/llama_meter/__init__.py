"""Measure llama.cpp on any GGUF, and say whether the computation was right."""
