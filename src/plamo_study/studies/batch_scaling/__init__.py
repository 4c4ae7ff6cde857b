"""What a step of many sequences costs."""
