"""The questions by name: what the engine is asked to do, with prompts of which lengths, and with which numbers."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llama_meter import children
from llama_meter.engine import builds
from llama_meter.errors import StudyError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from gguf.scripts.gguf_new_metadata import MetadataDetails

N_CTX = 128  # tokens of a slot
STEPS = 8  # tokens that a sequence goes on for behind its prompt
EQUAL, UNEQUAL = (24, 24, 24), (24, 17, 9)  # tokens of prompts
KEPT = 8  # tokens whose states a context keeps where some are taken back
DRAFTS = (1, 2, 3, 4)  # tokens of a draft
LISTED = "by layer"


@dataclass(frozen=True)
class Question:
    """A question in the words of a table's head; what it does stands in `hybrids.RULES`.

    `lengths`: tokens of each prompt; empty: as many short prompts as the number says. `numbers`: what it counts, if
    anything. `shared`: all sequences begin with the first one's prompt.
    """

    words: str
    lengths: tuple[int, ...]
    numbers: tuple[int, ...] = (0,)
    shared: bool = False


QUESTIONS = {
    "equal": Question("equal prompts in one call", EQUAL),
    "unequal": Question("unequal prompts in one call", UNEQUAL),
    "steps": Question("steps together", UNEQUAL),
    "late": Question("a prompt beside steps", UNEQUAL),
    "left": Question("one leaves, another comes", (*UNEQUAL, 12)),
    "gaps": Question("slots with gaps", UNEQUAL),
    "unified": Question("one cache for all", UNEQUAL),
    "slots": Question("so many slots", (), tuple(range(1, 18))),
    "cut": Question("a prompt cut", (24,), (1, 2, 3, 5, 8, 16)),
    "moved": Question("state to another slot", (24,)),
    "elsewhere": Question("state to another context", (24,)),
    "resized": Question("state to another number of slots", (24,)),
    "copied": Question("a prompt shared by copies", EQUAL, shared=True),
    "shifted": Question("positions shifted", (24,)),
    "back": Question("a draft taken back", (24,), DRAFTS),
    "kept": Question("a draft taken back, states kept", (24,), DRAFTS),
    "kept apart": Question("a draft taken back token by token", (24,), DRAFTS),
    "kept beside": Question("drafts of several slots", UNEQUAL, DRAFTS),
    "kept copied": Question("a draft taken back, then copied", EQUAL, DRAFTS, shared=True),
}
ABOUT_FILES = {LISTED: Question("head counts by layer", (24,))}  # about a file itself: nobody shares anything

NAME = "architectures"  # of the build
PLAIN = "plain"  # whole, and readable by older builds: without the generator's tokenizer and factors of tensors
STATE_FIRST = "state first"  # as plain, but the first layer is recurrent, and the number of heads one for all layers
SHAPES = {
    "whole": {},
    "three layers": {"ARCHS_LAYERS": "3"},
    "four heads": {"ARCHS_HEADS": "4"},
    PLAIN: {},
    STATE_FIRST: {"ARCHS_STATE_FIRST": "1"},
}
FACTORS = (".scale", ".input_scale")  # of a tensor, as NVFP4 has them; builds before they came refuse them
ROTATION, BIASES = {"rope_freqs.weight"}, {"attn_q.bias", "attn_k.bias", "attn_v.bias"}
TIED = {*BIASES, "output.weight"}
OPTIONAL = {  # which of the generator's tensors released files lack; builds before they came refuse them
    "falcon-h1": ROTATION,
    "granitehybrid": ROTATION,
    "jamba": BIASES,
    "kimi-linear": BIASES,
    "qwen35": BIASES,
    "qwen35moe": BIASES,
    "qwen3next": BIASES,
    "lfm2": TIED,
    "lfm2moe": TIED,
}
INTERVAL = ("qwen35", "qwen35moe", "qwen3next")  # whose attention layers older builds count: the second of two here
OLDER = {  # for older builds: layers of every kind, since some abort where all have a window; Mamba heads as wide as
    "plamo3": {"ARCHS_LAYERS": "8"},
    "plamo2": {"ARCHS_SSM_HEADS": "4"},  # attention's, as in the released file
}
LIMIT_S = 60.0


def short(name: str) -> str:
    """An architecture as tables and charts name it; a model that is none keeps its name."""
    return "llama MoE" if name == "llama-moe" else name.replace("-dense", "").replace("-moe", "")


def write(name: str, into: Path, shape: str = "whole", seed: int = 1) -> Path:
    """Write one file, e.g. "mamba2-dense" or "lfm2moe-moe", in F32, into a folder; returns its path.

    StudyError where the generator is not built, or cannot write this architecture in this shape.
    """
    arch = name.rpartition("-")[0]
    asked = [str(builds.program(NAME)), "-a", arch, "-s", str(seed), "-o", str(into)]
    plain = shape in (PLAIN, STATE_FIRST)
    surroundings = children.environment() | SHAPES[shape] | {"ARCHS_RWKV": "1"}
    surroundings |= OLDER.get(arch, {}) if plain else {}
    done = subprocess.run(asked, env=surroundings, capture_output=True, text=True, timeout=LIMIT_S)
    path = into / f"{name}.gguf"
    if done.returncode or not path.exists():
        said = [line for line in done.stderr.splitlines() if "GGML_ASSERT" in line or "error" in line.lower()]
        why = said[-1].rpartition("/")[2] if said else "not supported"
        raise StudyError(f"no file of {arch} in this shape", why, "ask another architecture, or its usual shape")
    return _without_news(path, arch) if plain else path


def _without_news(path: Path, arch: str) -> Path:
    """Write a file again without what older builds refuse: a tokenizer called "test", and tensors that came later."""
    from gguf import GGUFReader, GGUFValueType  # 0.2 s, and only such files need it
    from gguf.scripts.gguf_new_metadata import MetadataDetails

    changes = {"tokenizer.ggml.model": MetadataDetails(GGUFValueType.STRING, "none")}
    if arch in INTERVAL:
        changes[f"{arch}.full_attention_interval"] = MetadataDetails(GGUFValueType.UINT32, 2)
    reader, later = GGUFReader(path), OPTIONAL.get(arch, set())
    reader.tensors = [
        tensor
        for tensor in reader.tensors
        if not tensor.name.endswith(FACTORS) and re.sub(r"^blk\.\d+\.", "", tensor.name) not in later
    ]
    _copy(reader, path, arch, changes)
    return path


def by_layer(path: Path) -> Path:
    """Write a file again, with a number of heads for each layer: 0 for those without attention. Returns its path."""
    from gguf import GGUFReader, GGUFValueType
    from gguf.scripts.gguf_new_metadata import MetadataDetails

    reader, into = GGUFReader(path), path.with_suffix(".by-layer.gguf")
    fields = {field.name.partition(".")[2]: field.contents() for field in reader.fields.values()}
    n_heads, of_keys, arch = fields["attention.head_count"], fields["attention.head_count_kv"], fields["architecture"]
    usual = [not n for n in of_keys] if isinstance(of_keys, list) else [False] * fields["block_count"]
    heads = [0 if recurrent else n_heads for recurrent in fields.get("attention.recurrent_layers", usual)]
    by_layer = MetadataDetails(GGUFValueType.ARRAY, heads, sub_type=GGUFValueType.UINT32)
    _copy(reader, into, arch, {f"{arch}.attention.head_count": by_layer})
    return into


def _copy(reader: "GGUFReader", into: Path, arch: str, changes: "dict[str, MetadataDetails]") -> None:
    """Write what a reader holds, with other values in some fields; an empty list, which gguf cannot write, goes."""
    from gguf.scripts.gguf_new_metadata import copy_with_new_metadata

    from llama_meter.models.synthetic import writing

    empty = [field.name for field in reader.fields.values() if field.contents() == []]
    with writing(into, arch) as writer:
        copy_with_new_metadata(reader, writer, changes, empty)


TIMES = 30.0  # tolerance: so many times the rounding of the sequence alone, but at least
LEAST = {"F32": 5e-4, "F16": 2e-3, "Q8_0": 2e-2}  # by type. Kernels at 17 slots: up to 2e-4; activations that round
AGAIN = 5.0  # times that, where keys that are kept in F16 are rotated once more


def tolerance(question: str, rounding: float, dtype: str = "F32", gpu: bool = False) -> float:
    """Largest relative error of logits that rounding explains.

    On a GPU, F32 counts as F16: CUDA multiplies 4 to 16 columns in TF32, whose mantissa is as short (ggml-cuda/mmf.cu).
    """
    least = LEAST["F16" if gpu and dtype == "F32" else dtype]
    return max(least, TIMES * rounding) * (AGAIN if question == "shifted" else 1)
