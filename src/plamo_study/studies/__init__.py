"""One folder a chapter: its question, its plan, its work in a worker (no pandas), and what its page computes."""
