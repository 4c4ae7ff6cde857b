"""Is a hybrid's answer its own? Every recurrent architecture of llama.cpp."""
