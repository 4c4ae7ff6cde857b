"""The tensors that a PLaMo file must hold by its own metadata, and the faults of that metadata.

Types and ranges are those that llama.cpp's loader requires (src/llama-model.cpp `load_hparams`, src/models/plamo2.cpp
and plamo3.cpp), checked before they are used. It does not look at tensors.
"""

import math
from dataclasses import dataclass
from typing import Any

from llama_meter.models import registry
from llama_meter.models.finding import AGAIN, Finding, block, listed, printable
from llama_meter.models.header import ARRAY, FLOAT32, INT32, STRING, UINT32, Header
from llama_meter.models.registry import ARCHS, ModelSpec

MAX_LAYERS = 512  # llama-hparams.h, LLAMA_MAX_LAYERS
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")  # llama-model.cpp
MAX_WIDTH = 1 << 20  # of any layer; the widest PLaMo has 32,768
SIZES_KNOWN = {"head-count-array", "rope-dimensions"}  # blocking, but the tensor sizes are still known
REPAIR = "plamo-study models check FILE --repair OUT"
HANG = "lost rotation (D1): llama.cpp takes the rotary dimensions from layer 0, and the CPU backend never returns"


@dataclass(frozen=True)
class FileSpec(ModelSpec):
    """A ModelSpec read from a file, where `recurrent` says layer by layer which one is Mamba."""

    recurrent: tuple[bool, ...] = ()

    def is_mamba(self, layer: int) -> bool:
        """As the file's head_count_kv says: 0 means Mamba."""
        return self.recurrent[layer]


def read_spec(header: Header) -> tuple[FileSpec | None, list[Finding]]:
    """The spec that the file states, and every reason to doubt it; no spec when a size is in doubt."""
    arch = header.text("general.architecture")
    if arch not in ARCHS:
        why = f"general.architecture is {arch!r:.60}, not one of {', '.join(ARCHS)}"
        return None, [block("architecture", why, "name a PLaMo 2 or PLaMo 3 file")]
    keys = _Keys(header, str(arch))
    values = _sizes(keys) | (_mamba(keys) if arch == "plamo2" else _window(keys))
    keys.finish(values)
    if any(f.severity == "blocking" and f.code not in SIZES_KNOWN for f in keys.findings):
        return None, keys.findings
    return FileSpec(name=header.path.name, scale="file", arch=str(arch), **values), keys.findings


def rope_findings(spec: FileSpec) -> list[Finding]:
    """Findings on rotary bases and window, against the registry's model of this shape, or its architecture's."""
    models = [s for s in registry.load().values() if s.arch == spec.arch]
    model = next((s for s in models if _sizes_of(s) == _sizes_of(spec)), None)
    against = [model] if model else models
    name = model.name if model else f"every {spec.arch} known here"
    findings = []
    for field in ("rope_theta", "rope_theta_swa", "window", "window_pattern"):
        here, there = getattr(spec, field), {getattr(s, field) for s in against}
        if here not in there and not (field.startswith("window") and model is None):
            why = f"{field} is {here:g} in the file and {listed(f'{v:g}' for v in sorted(there))} in {name}"
            option = f" --rope-theta {max(there):g}" if field == "rope_theta" else ""
            mend = REPAIR + option if option else AGAIN
            findings.append(Finding("warning", field.replace("_", "-"), why, mend))
    return findings


def _sizes_of(spec: ModelSpec) -> tuple[int, ...]:
    return (spec.hidden, spec.layers, spec.heads, spec.kv_heads, spec.head_dim, spec.ffn, spec.mamba_heads, spec.vocab)


def _sizes(keys: "_Keys") -> dict[str, Any]:
    layers = keys.integer("block_count", high=MAX_LAYERS)
    hidden = keys.integer("embedding_length")
    heads = keys.heads(layers)
    head_dim = keys.integer("attention.key_length", default=hidden // max(heads, 1))
    if keys.integer("attention.value_length", default=head_dim) != head_dim or head_dim % 2:
        keys.block("key-range", f"keys are {head_dim} wide; values must be as wide, and the width even to be rotated")
    if keys.integer("rope.dimension_count", default=head_dim, low=0) != head_dim:
        keys.block("rope-dimensions", f"rope.dimension_count is not the head size {head_dim}. {HANG}")
    return {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "head_dim": head_dim,
        "ffn": keys.uniform("feed_forward_length", keys.per_layer("feed_forward_length", layers)),
        "vocab": keys.vocabulary(),
        "context_length": keys.integer("context_length", high=1 << 30),
        "rms_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-12, 1e-2),
        "rope_theta": keys.number("rope.freq_base", 1.0, 1e12, default=1e4),
        "tied": all(tensor.name != "output.weight" for tensor in keys.header.tensors),
    } | keys.kv_heads(layers, heads)


def _mamba(keys: "_Keys") -> dict[str, Any]:
    heads, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if inner % heads:
        keys.block("key-range", f"ssm.inner_size {inner} is no multiple of the {heads} Mamba heads")
    if keys.integer("ssm.group_count", low=0) != 0:
        keys.block("key-range", "ssm.group_count is not 0, as PLaMo 2 has it: llama.cpp would size its state by it")
    return {
        "mamba_heads": heads,
        "mamba_head_dim": inner // heads,
        "d_state": keys.integer("ssm.state_size", high=1 << 12),
        "d_conv": keys.integer("ssm.conv_kernel", high=64),
    }


def _window(keys: "_Keys") -> dict[str, Any]:
    pattern = keys.header.records.get(f"{keys.arch}.attention.sliding_window_pattern")
    listed_layers = pattern is not None and pattern.kind == ARRAY
    window = keys.integer("attention.sliding_window", default=0, low=0, high=1 << 30)
    return {
        "window": window,
        "window_pattern": 8 if listed_layers else keys.integer("attention.sliding_window_pattern", default=8, low=0),
        "rope_theta_swa": keys.number("rope.freq_base_swa", 1.0, 1e12, default=1e4) if window else 0.0,
    }


class _Keys:
    """Typed access to an architecture's keys; faults are collected, and a harmless value is returned instead."""

    def __init__(self, header: Header, arch: str):
        self.header, self.arch = header, arch
        self.findings: list[Finding] = []
        self.without_heads: set[int] = set()

    def block(self, code: str, why: str, mend: str = AGAIN) -> None:
        """Note a reason not to use the file."""
        self.findings.append(block(code, why, mend))

    def integer(self, name: str, default: int | None = None, low: int = 1, high: int = MAX_WIDTH) -> int:
        """A u32, the only width llama.cpp takes."""
        key = f"{self.arch}.{name}"
        if not self._has(key, UINT32, "u32", default is None):
            return low if default is None else default
        value = int(self.header.value(key))
        if not low <= value <= high:
            self.block("key-range", f"{key} is {value:,}, not within {low:,} to {high:,}")
            return low
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """An f32; NaN is in no range. Shortened to the seven digits that an f32 has."""
        key = f"{self.arch}.{name}"
        if not self._has(key, FLOAT32, "f32", default is None):
            return low if default is None else default
        value = float(f"{self.header.value(key):.7g}")
        if not low <= value <= high:
            self.block("key-range", f"{key} is {value:g}, not within {low:g} to {high:g}")
        return value if math.isfinite(value) else low

    def per_layer(self, name: str, layers: int) -> list[int]:
        """A u32, or an array of them with one entry for each layer."""
        key = f"{self.arch}.{name}"
        record = self.header.records.get(key)
        if record is None or record.kind != ARRAY:
            so_far, value = len(self.findings), self.integer(name, low=0)
            return [value if len(self.findings) == so_far else 1] * layers
        if record.item not in (UINT32, INT32) or record.count != layers:
            self.block("key-type", f"{key} is an {record.type_name} of {record.count:,} entries, not {layers} u32")
            return [1] * layers
        values = [int(value) for value in self.header.value(key)]
        if not all(0 <= value <= MAX_WIDTH for value in values):
            self.block("key-range", f"{key} holds {listed(values)}, not all within 0 to {MAX_WIDTH:,}")
            return [1] * layers
        return values

    def uniform(self, name: str, values: list[int]) -> int:
        """The one number that all layers have; layers with 0 are left out."""
        distinct = sorted(set(values) - {0})
        if len(distinct) != 1:
            self.block("key-range", f"{self.arch}.{name} is {listed(values)}; PLaMo has one number for all layers")
        return distinct[0] if distinct else 1

    def heads(self, layers: int) -> int:
        """The head count; as an array that starts with 0, rotation is lost (D1)."""
        name = "attention.head_count"
        values, record = self.per_layer(name, layers), self.header.records.get(f"{self.arch}.{name}")
        self.without_heads = {layer for layer, value in enumerate(values) if value == 0}
        if record and record.kind == ARRAY and values[0] == 0:
            self.block("head-count-array", f"{record.key} is an array with 0 for layer 0. {HANG}", REPAIR)
        return self.uniform(name, values)

    def kv_heads(self, layers: int, heads: int) -> dict[str, Any]:
        """Key/value heads, and which layers have none: those are Mamba."""
        name = "attention.head_count_kv"
        values = self.per_layer(name, layers)
        kv_heads, recurrent = self.uniform(name, values), tuple(value == 0 for value in values)
        usual = tuple(self.arch == "plamo2" and layer % 2 == 0 for layer in range(layers))
        if self.arch == "plamo3" and any(recurrent):
            self.block("key-range", f"layers {listed(i for i, r in enumerate(recurrent) if r)} have no key/value heads")
        elif recurrent != usual:
            why = f"{sum(recurrent)} of {layers} layers are Mamba, not every even one as in PLaMo 2"
            self.findings.append(Finding("warning", "layer-pattern", why, AGAIN))
        if without := [layer for layer in self.without_heads if not recurrent[layer]]:
            self.block("key-range", f"layers {listed(without)} have key/value heads but no heads")
        if heads % kv_heads:
            self.block("key-range", f"{heads} heads cannot share {kv_heads} key/value heads")
        return {"kv_heads": kv_heads, "recurrent": recurrent}

    def vocabulary(self) -> int:
        """Number of tokens, from which llama.cpp takes the embedding's rows."""
        record = self.header.records.get("tokenizer.ggml.tokens")
        n_tokens = record.count if record and (record.kind, record.item) == (ARRAY, STRING) else 0
        said = self.integer("vocab_size", default=n_tokens, low=0)
        if said != n_tokens:
            why = f"{self.arch}.vocab_size is {said:,}, the file has {n_tokens:,} tokens"
            self.findings.append(Finding("warning", "vocabulary-size", why, AGAIN))
        return n_tokens

    def finish(self, values: dict[str, Any]) -> None:
        """Checks beyond single sizes: rotary scaling."""
        kind = self.header.text(f"{self.arch}.rope.scaling.type")
        if kind not in (None, *ROPE_SCALINGS):
            self.block("key-range", f"rope.scaling.type is {printable(kind)}, not one of {', '.join(ROPE_SCALINGS)}")
        elif kind not in (None, "none"):
            why = f"rope.scaling.type is {kind}, which the oracle does not know: the gate cannot compare logits"
            self.findings.append(Finding("note", "rope-scaling", why, "compare with another build of the engine"))

    def _has(self, key: str, kind: int, name: str, required: bool) -> bool:
        record = self.header.records.get(key)
        if record is None:
            if required:
                self.block("key-missing", f"{key} is not in the file")
            return False
        if record.kind != kind:
            self.block("key-type", f"{key} is {record.type_name}, not {name}")
            return False
        return True
