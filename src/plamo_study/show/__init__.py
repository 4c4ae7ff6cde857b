"""Theme, charts, tables, and the line of evidence."""
