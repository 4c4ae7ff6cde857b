"""Plan, sweep, worker, and what the machine did meanwhile."""
