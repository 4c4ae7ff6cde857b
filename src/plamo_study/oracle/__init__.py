"""Independent NumPy forward pass of PLaMo 2 and PLaMo 3 from a GGUF, to hold the engine's logits against.

Written from the architecture, in float32, without caches, batches or kernels: nothing here is fast on purpose, and
nothing is shared with llama.cpp but the file. It does not know tokenizers, sampling, or rope scaling (YaRN).
"""

from plamo_study.oracle.compare import Agreement, agreement, relative_error
from plamo_study.oracle.forward import Oracle
from plamo_study.oracle.judge import Judged, judge

__all__ = ["Agreement", "Judged", "Oracle", "agreement", "judge", "relative_error"]
