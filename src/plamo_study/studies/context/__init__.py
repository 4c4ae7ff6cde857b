"""What a long context costs: time, memory, drift."""
