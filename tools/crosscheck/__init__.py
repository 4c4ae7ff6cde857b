"""Our figures compared with those of other tools, and the harness with its requirements."""
