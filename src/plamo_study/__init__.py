"""Measure, explain and trust LLM inference on llama.cpp, told through PLaMo 2 and PLaMo 3."""

import sys

# Jupyter and Altair import jsonschema, and that a grammar of internationalised addresses which takes seconds to build.
# It does without where there is none; nothing here checks such addresses.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type] # None: not to be imported
