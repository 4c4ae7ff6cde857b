"""What an engine does in one request, operator by operator."""
