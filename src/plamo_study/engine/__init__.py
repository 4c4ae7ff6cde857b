"""llama.cpp through llama-cpp-python's batch API. The engine's libraries are loaded when it is first used."""
