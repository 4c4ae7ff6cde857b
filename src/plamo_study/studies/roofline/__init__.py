"""Every timed cell of every study under the ceilings of its machine."""
