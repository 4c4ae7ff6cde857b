"""What to do next: what every lever gives by the rows of the other studies. Nothing is measured here."""
