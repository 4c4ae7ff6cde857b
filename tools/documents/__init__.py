"""The parts of README, USING, FINDINGS, the schema and the upstream reports that are written from recorded rows."""
