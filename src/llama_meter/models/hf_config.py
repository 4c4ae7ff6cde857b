"""config.json of a released PLaMo as a `ModelSpec`: which keys decide its shapes, rotary frequencies and windows.

Keys, as the reference models use them:

- shapes: hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, intermediate_size, vocab_size;
  PLaMo 2 also hidden_size_per_head (of attention and Mamba heads alike), mamba_num_heads, mamba_d_state,
  mamba_d_conv; PLaMo 3 head_dim. tie_word_embeddings is true when absent: that is transformers' default.
- PLaMo 2 rotary base: attention layers in full_attention_idx rotate with rope_theta, the others with
  rope_local_theta, or rope_theta when that is absent; 1e4 when both are: the first releases have neither. The engine
  knows one base for all layers, so a configuration that mixes two is refused.
- PLaMo 2 window: attention_window_size hides older keys from the layers outside full_attention_idx. The engine
  applies no window to PLaMo 2: `Configuration.window` says so.
- PLaMo 3 rotary bases: rope_parameters.full_attention.rope_theta, or rope_theta, or rope_global_theta, for the full
  layers; rope_parameters.sliding_attention.rope_theta, or rope_local_theta, for the sliding ones.
- PLaMo 3 windows: window_size, or sliding_window as a number or as one entry per layer, null for full ones;
  sliding_window_pattern. Published defaults of bases and windows differ, so all of them must be given.
- PLaMo 3 YaRN: rope_scaling_factor other than 1, with initial_context_length.

It does not read weights or vocabularies. The one key of its own is mamba_head_dim, which `released` writes for mini
models whose Mamba heads are wider than their attention heads.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_meter.errors import StudyError
from llama_meter.models import hf
from llama_meter.models.registry import ModelSpec

ARCHITECTURES = {
    "Plamo2ForCausalLM": "plamo2",
    "PLaMo2ForCausalLM": "plamo2",
    "Plamo3ForCausalLM": "plamo3",
    "PLaMo3ForCausalLM": "plamo3",
}
COMMON = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "context_length": "max_position_embeddings",
}
SIZES = {
    "plamo2": COMMON
    | {
        "head_dim": "hidden_size_per_head",
        "mamba_heads": "mamba_num_heads",
        "d_state": "mamba_d_state",
        "d_conv": "mamba_d_conv",
    },
    "plamo3": COMMON | {"head_dim": "head_dim", "window_pattern": "sliding_window_pattern"},
}
LARGEST = {"layers": 512, "vocab": 2**18, "context_length": 2**32 - 1}  # 512: the engine's own limit
LARGEST_SIZE = 2**20  # of every other size: far above released ones, and absurd ones must not cost memory or time
ONLY = {  # the only values that the engine supports; every key may be absent
    "mamba_enabled": True,
    "mamba_step": 2,
    "attention_bias": False,
    "scale_embedding": False,
    "linear_type": "normal",
    "quantization_config": None,
}
PLAMO2_THETA = 1e4  # the reference's constant before it had a key


@dataclass(frozen=True)
class Configuration:
    """A model as its configuration describes it.

    `window`: tokens the reference's PLaMo 2 attention looks back, 0 for all; the engine ignores it.
    `yarn`: factor and original context length of PLaMo 3's rope scaling, None without.
    """

    spec: ModelSpec
    window: int = 0
    yarn: tuple[float, int] | None = None


def read(folder: Path) -> Configuration:
    """The configuration in `folder`/config.json.

    Raises StudyError for a missing file, an architecture that is no PLaMo 2 or 3, a missing or absurd key, and
    settings the engine cannot compute.
    """
    path = folder / "config.json"
    config = hf.read_json(path)
    arch = _arch(path, config)
    for key, value in ONLY.items():
        if config.get(key, value) not in (value, None):
            raise _wrong(path, key, f"is {config[key]!r:.60}; the engine computes only {value!r}")
    fields: dict[str, Any] = {
        name: _size(path, config, key, LARGEST.get(name, LARGEST_SIZE)) for name, key in SIZES[arch].items()
    }
    fields |= {"tied": config.get("tie_word_embeddings", True) is not False, "arch": arch, "scale": "weights"}
    fields |= {"name": _name(folder, config), "rms_eps": _positive(path, config, "rms_norm_eps")}
    if fields["heads"] % fields["kv_heads"]:
        raise _wrong(path, "num_attention_heads", "is no multiple of num_key_value_heads")
    return _plamo2(path, config, fields) if arch == "plamo2" else _plamo3(path, config, fields)


def _arch(path: Path, config: dict[str, Any]) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else config.get("model_type")
    if isinstance(name, str) and (arch := ARCHITECTURES.get(name, name)) in SIZES:
        return arch
    raise _wrong(path, "architectures", f"is {names!r:.60}, not one of {', '.join(ARCHITECTURES)}")


def _plamo2(path: Path, config: dict[str, Any], fields: dict[str, Any]) -> Configuration:
    if fields["layers"] < 2:
        raise _wrong(path, "num_hidden_layers", "is 1: PLaMo 2 alternates Mamba and attention layers")
    fields["mamba_head_dim"] = fields["head_dim"]
    if "mamba_head_dim" in config:
        fields["mamba_head_dim"] = _size(path, config, "mamba_head_dim", LARGEST_SIZE)
    theta, local = _thetas(path, config)
    theta = PLAMO2_THETA if theta is None else theta
    listed = config.get("full_attention_idx") or []
    if not isinstance(listed, list):
        raise _wrong(path, "full_attention_idx", "is no list")
    full = {layer for layer in listed if isinstance(layer, int)}
    windowed = [layer not in full for layer in range(1, fields["layers"], 2)]
    used = {(local or theta) if slides else theta for slides in windowed}
    if len(used) > 1:
        raise _wrong(path, "rope_local_theta", f"differs from rope_theta, {sorted(used)}: the engine has one for all")
    if _yarn(path, config):
        raise _wrong(path, "rope_scaling", "is not something the engine does for PLaMo 2")
    window = _size(path, config, "attention_window_size", 2**32 - 1) if "attention_window_size" in config else 0
    return Configuration(ModelSpec(**fields, rope_theta=used.pop()), window if any(windowed) else 0)


def _plamo3(path: Path, config: dict[str, Any], fields: dict[str, Any]) -> Configuration:
    theta, local = _thetas(path, config)
    if theta is None or local is None:
        raise _wrong(path, "rope_theta" if theta is None else "rope_local_theta", "is missing")
    spec = ModelSpec(**fields, rope_theta=theta, rope_theta_swa=local, window=_window(path, config, fields))
    return Configuration(spec, yarn=_yarn(path, config))


def _window(path: Path, config: dict[str, Any], fields: dict[str, Any]) -> int:
    if config.get("window_size") is not None:
        return _size(path, config, "window_size", 2**32 - 1)
    listed = config.get("sliding_window")
    if not isinstance(listed, list):
        return _size(path, config, "sliding_window", 2**32 - 1)
    window = _size(path, {"sliding_window": next(iter(listed), None)}, "sliding_window", 2**32 - 1)
    pattern = fields["window_pattern"]
    if listed != [None if (layer + 1) % pattern == 0 else window for layer in range(fields["layers"])]:
        raise _wrong(path, "sliding_window", f"is not one window in all layers but each {pattern}th")
    return window


def _rope(path: Path, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Nested rope settings of full and of sliding layers, both empty where a configuration has only flat keys."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    full = nested.get("full_attention", nested) if isinstance(nested, dict) else None
    sliding = nested.get("sliding_attention", {}) if isinstance(nested, dict) else None
    if not isinstance(full, dict) or not isinstance(sliding, dict):
        raise _wrong(path, "rope_parameters", "is no table of rope settings")
    return full, sliding


def _thetas(path: Path, config: dict[str, Any]) -> tuple[float | None, float | None]:
    """Rotary base of full and of sliding layers, None where the configuration does not say."""
    full, sliding = _rope(path, config)
    given = {
        "rope_theta": full.get("rope_theta", config.get("rope_theta", config.get("rope_global_theta"))),
        "rope_local_theta": sliding.get("rope_theta", config.get("rope_local_theta")),
    }
    theta, local = (None if value is None else _positive(path, given, key) for key, value in given.items())
    return theta, local


def _yarn(path: Path, config: dict[str, Any]) -> tuple[float, int] | None:
    full, _ = _rope(path, config)
    if (kind := full.get("rope_type", full.get("type", "default"))) not in ("default", "yarn"):
        raise _wrong(path, "rope_type", f"is {kind!r:.40}, not yarn")
    flat = {"factor": config.get("rope_scaling_factor"), "original": config.get("initial_context_length")}
    nested = {"factor": full.get("factor"), "original": full.get("original_max_position_embeddings")}
    given = nested if nested["factor"] is not None else flat
    if given["factor"] in (None, 1):
        return None
    return _positive(path, given, "factor"), _size(path, given, "original", 2**32 - 1)


def _size(path: Path, config: dict[str, Any], key: str, largest: int) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 < value <= largest:
        why = "is missing" if value is None else f"is {value!r:.40}, not a whole number from 1 to {largest:,}"
        raise _wrong(path, key, why)
    return value


def _positive(path: Path, config: dict[str, Any], key: str) -> float:
    value: Any = config.get(key)
    if type(value) not in (int, float) or not 0 < value < 1e30 or not math.isfinite(value):
        raise _wrong(path, key, "is missing" if value is None else f"is {value!r:.40}, not a positive number")
    return float(value)


def _name(folder: Path, config: dict[str, Any]) -> str:
    """The model's own name, else the repository of a snapshot in the hub's cache, else the folder's name."""
    given = config.get("_name_or_path")
    if isinstance(given, str) and given and given.count("/") < 2 and given.isprintable():
        return given[:200]
    folder = folder.resolve()
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name.encode(errors="replace").decode()


def _wrong(path: Path, key: str, why: str) -> StudyError:
    return StudyError(f"{path}, {key}", why, "name the folder of a released PLaMo 2 or PLaMo 3")
