"""Pure functions from frames of rows to estimates. Nothing here runs an engine, starts a process or draws."""
