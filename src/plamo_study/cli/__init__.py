"""The command line and what it prints."""

from llama_meter import surroundings

surroundings.prepare()
