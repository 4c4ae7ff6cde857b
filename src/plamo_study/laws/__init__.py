"""What a study computes with its frames: laws, predictions, forecasts."""
