"""A server under load, and a probe for any server."""
