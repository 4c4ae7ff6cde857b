"""llama.cpp through llama-cpp-python's batch API. Importing this room loads the engine's shared library."""
