"""llama.cpp through ctypes, and builds of it by name."""
