"""Loaded before pytest's plugins: the package keeps jsonschema from building a grammar, a second in each process."""

import plamo_study  # noqa: F401
