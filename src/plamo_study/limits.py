"""Limits that measuring and analysis must agree on, below both of them."""

DRIFT_LIMIT = 0.10  # a block further than this from the others is measured again, and used only where none are steadier
LAW_TOLERANCE = 0.02  # of a replay on F16 minis: rounding is 1e-2 at most, a fading wrong state 0.05 at least
DRAWS = 8  # of each control of a scan: chunk k belongs to draw k mod DRAWS
