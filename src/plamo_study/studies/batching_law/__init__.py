"""Which calls make PLaMo 2 compute wrongly, or abort: a law, held against the engine."""
