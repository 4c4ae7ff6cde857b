"""What fewer bits cost in quality."""
