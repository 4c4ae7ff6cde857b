"""Measure, explain and trust LLM inference on llama.cpp, told through PLaMo 2 and PLaMo 3."""

import sys

# Jupyter and Altair import jsonschema, which imports a grammar of internationalised addresses that takes seconds to
# build. jsonschema works without that grammar, and nothing here checks such addresses.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type] # None: not to be imported
