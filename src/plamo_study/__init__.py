"""Measure, explain and trust LLM inference on llama.cpp, told through PLaMo 2 and PLaMo 3."""
