"""A server under load, and a probe for anybody's."""
