"""The models this project knows, read from data/models.toml.

It knows shapes, never weights: a `ModelSpec` says which tensors a file must hold, not whether a file exists.
"""

import re
import tomllib
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path

from llama_meter.errors import StudyError
from llama_meter.paths import MODELS_TOML

SCALES = ("mini", "shape")
DTYPES = ("F32", "F16", "BF16", "Q8_0")
ARCHS = ("plamo2", "plamo3")
FILE_SCALE = "file"  # of files that a request names by their paths
MIXTURES = {
    "IQ3_M": "IQ3_S",
    "IQ3_XS": "IQ3_S",
    "IQ2_M": "IQ2_S",
    "IQ2_S": "IQ2_XS",
}  # named by another than their type
FILE_TYPES = {  # llama.cpp's file types (llama.h, enum llama_ftype), and the type of a matrix without a special rule
    name: MIXTURES.get(name, re.sub(r"(?<=K)_[SML]$", "", name))
    for name in (
        *("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0"),
        *("IQ4_NL", "IQ4_XS", "Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS", "Q2_K", "Q2_K_S"),
        *("IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ2_0", "TQ1_0"),
    )
}
FLOATS = ("F32", "F16", "BF16")
BEYOND_ORACLE = {"tensor-scale", "rope-scaling"}  # findings about what the oracle does not compute


@dataclass(frozen=True)
class ModelSpec:
    """One model at one scale: every number that decides the tensors of its file.

    Sizes are element counts, `context_length` and `window` are tokens. Mamba fields are 0 for PLaMo 3,
    window fields 0 for PLaMo 2. `trained`: its F16 file is committed (models/synthetic.py), not random.
    """

    name: str
    scale: str
    arch: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context_length: int
    rms_eps: float
    rope_theta: float
    tied: bool
    rope_theta_swa: float = 0.0
    window: int = 0
    window_pattern: int = 0
    mamba_heads: int = 0
    mamba_head_dim: int = 0
    d_state: int = 0
    d_conv: int = 0
    parameters: int | None = None
    trained: bool = False
    assumptions: tuple[str, ...] = ()
    sha256: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def d_inner(self) -> int:
        """Width of the Mamba block: mamba_heads · mamba_head_dim."""
        return self.mamba_heads * self.mamba_head_dim

    @property
    def dt_dim(self) -> int:
        """Rank of the step-size projection: max(64, hidden / 16), as the engine derives it."""
        return max(64, self.hidden // 16)

    @property
    def n_params(self) -> int:
        """Number of weights, tied embeddings counted once."""
        return sum(prod(shape) for shape in self.tensor_shapes().values())

    def is_mamba(self, layer: int) -> bool:
        """PLaMo 2 alternates, starting with Mamba; PLaMo 3 has no Mamba layer."""
        return self.arch == "plamo2" and layer % 2 == 0

    def kv_heads_of(self, layer: int) -> int:
        """Key/value heads of a layer, 0 for Mamba, by which the engine knows recurrent layers."""
        return 0 if self.is_mamba(layer) else self.kv_heads

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor name → shape in NumPy order (out, in), in the order a file holds them."""
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            mixer = self._mamba_shapes() if self.is_mamba(layer) else self._attention_shapes()
            block = {"attn_norm.weight": (self.hidden,), **mixer, **self._ffn_shapes()}
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
        shapes["output_norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["output.weight"] = (self.vocab, self.hidden)
        return shapes

    def _ffn_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "post_attention_norm": (self.hidden,),
            "ffn_norm.weight": (self.hidden,),
            "ffn_up.weight": (2 * self.ffn, self.hidden),
            "ffn_down.weight": (self.hidden, self.ffn),
            "post_ffw_norm": (self.hidden,),
        }

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        per_head = self.arch == "plamo2"
        return {
            "attn_qkv.weight": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "attn_q_norm.weight": (self.heads, self.head_dim) if per_head else (self.head_dim,),
            "attn_k_norm.weight": (self.kv_heads, self.head_dim) if per_head else (self.head_dim,),
            "attn_output.weight": (self.hidden, self.heads * self.head_dim),
        }

    def _mamba_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "ssm_in.weight": (2 * self.d_inner, self.hidden),
            "ssm_conv1d.weight": (self.d_inner, self.d_conv),
            "ssm_x.weight": (self.dt_dim + 2 * self.d_state, self.d_inner),
            "ssm_dt.weight": (self.mamba_heads, self.dt_dim),
            "ssm_dt.bias": (self.mamba_heads,),
            "ssm_a": (self.mamba_heads,),
            "ssm_d": (self.mamba_heads,),
            "ssm_out.weight": (self.hidden, self.d_inner),
            "ssm_dt_norm": (self.dt_dim,),
            "ssm_b_norm": (self.d_state,),
            "ssm_c_norm": (self.d_state,),
        }


@lru_cache
def load() -> dict[tuple[str, str], ModelSpec]:
    """Read the registry: (model name, scale) → spec, in file order. TypeError for an unknown or a missing field."""
    raw = tomllib.loads(MODELS_TOML.read_text(encoding="utf-8"))
    specs = {}
    for name, entry in raw["models"].items():
        of_arch = {"arch": entry["arch"], **raw["arch"].get(entry["arch"], {})}
        published = {"parameters": entry.get("parameters"), "assumptions": tuple(entry.get("assumptions", ()))}
        for scale in SCALES:
            if scale in entry:
                more = published if scale == "shape" else {}
                specs[name, scale] = ModelSpec(name=name, scale=scale, **(of_arch | entry[scale] | more))
    return specs


@dataclass(frozen=True)
class ModelFile:
    """A file that a request names: where it lies, all its parts, what it states, and the codes of its findings."""

    path: Path
    parts: tuple[Path, ...]
    spec: ModelSpec
    dtype: str
    sha256: str
    findings: tuple[str, ...]

    @property
    def file(self) -> tuple[str, str, str]:
        """As cells name it: model, scale and type."""
        return self.spec.name, FILE_SCALE, self.dtype

    @property
    def n_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.stat().st_size for part in self.parts)

    @property
    def has_oracle(self) -> bool:
        """Whether the oracle can judge it: PLaMo in one part, with nothing that the oracle does not compute."""
        return self.spec.arch in ARCHS and len(self.parts) == 1 and not set(self.findings) & BEYOND_ORACLE


FILES: dict[tuple[str, str, str], ModelFile] = {}  # that requests of this process name, by the names of cells


def path_of(name: str, dtype: str) -> Path:
    """Where a file lies that a request names. StudyError for one that none of this process names."""
    if not (file := FILES.get((name, FILE_SCALE, dtype))):
        raise StudyError(f"{name} in {dtype}", "is a file of yours, and this call does not name it", "add --file PATH")
    return file.path


def spec(name: str, scale: str) -> ModelSpec:
    """The spec of a model at a scale; StudyError listing the known ones when there is none."""
    specs = load() | {(file.spec.name, FILE_SCALE): file.spec for file in FILES.values()}
    if (name, scale) in specs:
        return specs[name, scale]
    known = ", ".join(f"{model} ({at})" for model, at in specs)
    raise StudyError(f"model {name!r} at scale {scale!r}", f"unknown; known: {known}", "choose one of these")
