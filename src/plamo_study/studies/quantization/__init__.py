"""What fewer bits cost and give in speed."""
