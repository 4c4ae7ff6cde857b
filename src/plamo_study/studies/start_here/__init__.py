"""The argument in five minutes, from what the other studies recorded: nothing is measured here."""
