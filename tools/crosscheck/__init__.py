"""Our figures beside those of other tools, and the harness beside what it should do."""
