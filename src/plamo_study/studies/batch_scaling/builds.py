"""The builds and models that notebook 03 compares."""

HYBRID = "plamo-2-1b"
CORRECT, FLAT = "corrected", "corrected-projections"
