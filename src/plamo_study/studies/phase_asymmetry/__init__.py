"""How far apart prefill and decode are, and which ceiling limits each."""
