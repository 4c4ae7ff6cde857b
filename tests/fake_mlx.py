"""mlx and mlx-lm as far as tools/mlx_model.py calls them, computed by our oracle on a GGUF: `install(folder)`.

The signatures are held against mlx-lm's wheel by tests/test_mlx_beside.py. A folder of "weights" names its GGUF, and
may ask for a wrong answer.
"""

import json
from pathlib import Path

FILES = {
    "mlx/__init__.py": "",
    "mlx/core.py": """
import numpy as np

float32, array, gpu = np.float32, np.array, "gpu"


def eval(*arrays):
    pass


def default_device():
    return "cpu"
""",
    "mlx_lm/__init__.py": "",
    "mlx_lm/models/__init__.py": "",
    "mlx_lm/models/ssm.py": """
def ssm_update(hidden_states, A_log, B, C, D, dt, dt_bias, state=None, time_step_limit=(0.001, 100.0), mask=None,
               lengths=None):
    return time_step_limit
""",
    "mlx_lm/models/plamo2.py": "from .ssm import ssm_update\n",
    "mlx_lm/models/cache.py": """
class Tokens:
    def __init__(self):
        self.state = []


def make_prompt_cache(model, max_kv_size=None):
    return [Tokens()]
""",
    "mlx_lm/utils.py": """
import json

import numpy as np

from mlx_lm.models import plamo2
from llama_meter.oracle.forward import Oracle


def load_model(model_path, lazy=False, strict=True, model_config=None):
    config = json.loads((model_path / "config.json").read_text())
    oracle = Oracle(config["gguf"])

    def model(inputs, cache):
        ((tokens,), (kept,)) = np.asarray(inputs), cache
        first = len(kept.state)
        kept.state = [*kept.state, *tokens.tolist()]
        logits = oracle.logits(kept.state, range(first, len(kept.state)))
        clipped = config["clipped"] and plamo2.ssm_update(*[None] * 7)[0] > 0
        return np.roll(logits, 1, axis=1)[None] if clipped else logits[None]

    return model, {"vocab_size": oracle.n_vocab}
""",
    "mlx_lm/generate.py": """
from mlx_lm.models.cache import make_prompt_cache


def generate_step(prompt, model, stream=None, *, max_tokens=256, prompt_cache=None, prefill_step_size=2048):
    cache, tokens = prompt_cache or make_prompt_cache(model), prompt
    while max_tokens:
        logits = model(tokens[None] if tokens.ndim else tokens.reshape(1, 1), cache=cache)[0, -1]
        tokens, max_tokens = logits.argmax(), max_tokens - 1
        yield int(tokens), logits
""",
}


def install(folder: Path) -> Path:
    """Write the packages; `folder` is then to be on Python's path."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def weights(folder: Path, gguf: Path, clipped: bool = False) -> Path:
    """A folder that loads as this GGUF; `clipped`: with wrong logits as long as dt is bounded from below."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"gguf": str(gguf.resolve()), "clipped": clipped}))
    return folder
