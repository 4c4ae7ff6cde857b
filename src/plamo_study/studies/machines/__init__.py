"""Several machines side by side, each held against its own ceilings. Nothing is measured here."""
