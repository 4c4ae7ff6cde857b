"""Journals become one tidy frame; usable rows and names of machines are decided here."""
