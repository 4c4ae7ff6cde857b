"""How far apart prefill and decode are, and which ceiling each stands under."""
