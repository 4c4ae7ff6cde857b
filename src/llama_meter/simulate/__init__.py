"""The scheduler's loop, its policies and clocks."""
