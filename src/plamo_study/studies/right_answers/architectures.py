"""The questions by name: what the engine is asked to do, with prompts of which lengths, and with which numbers."""

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_meter import children
from llama_meter.engine import builds
from llama_meter.errors import StudyError

if TYPE_CHECKING:
    from gguf import GGUFReader

N_CTX = 128  # tokens of a slot
STEPS = 8  # tokens that a sequence goes on for behind its prompt
EQUAL, UNEQUAL = (24, 24, 24), (24, 17, 9)  # tokens of prompts
KEPT = 8  # tokens whose states a context keeps where some are taken back
DRAFTS = (1, 2, 3, 4)  # tokens of a draft
LISTED = "by layer"


@dataclass(frozen=True)
class Question:
    """A question in the words of a table's head, and what the engine is asked to do.

    `lengths`: tokens of each prompt; empty: as many short prompts as the number says. `numbers`: what it counts, if
    anything. `shared`: all sequences begin with the first one's prompt.
    """

    words: str
    how: str
    lengths: tuple[int, ...]
    numbers: tuple[int, ...] = (0,)
    shared: bool = False


QUESTIONS = {
    "equal": Question("equal prompts in one call", "All prompts are read in one call.", EQUAL),
    "unequal": Question("unequal prompts in one call", "All prompts are read in one call.", UNEQUAL),
    "steps": Question("steps together", "Prompts are read one by one, and all sequences step together.", UNEQUAL),
    "late": Question("a prompt beside steps", "A prompt is read in a call with the steps of others.", UNEQUAL),
    "left": Question(
        "one leaves, another comes",
        "One leaves, and another takes its slot while others go on.",
        (*UNEQUAL, 12),
    ),
    "gaps": Question("slots with gaps", "The slots in use do not lie side by side.", UNEQUAL),
    "unified": Question("one cache for all", "All sequences share one cache and step together.", UNEQUAL),
    "slots": Question(
        "so many slots", "Prompts are read one by one, and all sequences step together.", (), tuple(range(1, 18))
    ),
    "cut": Question(
        "a prompt cut", "A prompt is read in micro-batches of this many tokens.", (24,), (1, 2, 3, 5, 8, 16)
    ),
    "moved": Question("state to another slot", "A saved state goes on in another slot.", (24,)),
    "elsewhere": Question("state to another context", "A saved state goes on in another context.", (24,)),
    "resized": Question(
        "state to another number of slots", "A saved state goes on in a context with another number of slots.", (24,)
    ),
    "copied": Question(
        "a prompt shared by copies",
        "One prompt is read, its state copied, and the copies go on with tokens of their own.",
        EQUAL,
        shared=True,
    ),
    "shifted": Question(
        "positions shifted",
        "A sequence's positions are moved on: attention looks at distances, and a state knows no position.",
        (24,),
    ),
    "back": Question(
        "a draft taken back",
        "A draft of this many tokens is evaluated behind a right one, in one call, and taken back.",
        (24,),
        DRAFTS,
    ),
    "kept": Question(
        "a draft taken back, states kept",
        "The same in a context that keeps the states of its last tokens.",
        (24,),
        DRAFTS,
    ),
    "kept apart": Question(
        "a draft taken back token by token",
        "States are kept too, and each token of the draft comes in a call of its own.",
        (24,),
        DRAFTS,
    ),
    "kept beside": Question(
        "drafts of several slots",
        "Several slots are read in another order, and each has a draft taken back: the first one's is a token longer.",
        UNEQUAL,
        DRAFTS,
    ),
    "kept copied": Question(
        "a draft taken back, then copied",
        "A draft of one call is taken back, and copies of the sequence go on with tokens of their own.",
        EQUAL,
        DRAFTS,
        shared=True,
    ),
}
ABOUT_FILES = {  # a question about a file itself: nobody shares anything
    LISTED: Question(
        "head counts by layer",
        "The file has a number of heads for each layer, 0 in the first; it is held against the same file with one.",
        (24,),
    ),
}

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
    from gguf import GGUFReader  # 0.2 s, and only such files need it

    changed: dict[str, Any] = {"tokenizer.ggml.model": "none"}
    if arch in INTERVAL:
        changed[f"{arch}.full_attention_interval"] = 2
    later = OPTIONAL.get(arch, set())
    _write_again(GGUFReader(path), path, changed, lambda tensor: tensor.endswith(FACTORS) or tensor in later)
    return path


def by_layer(path: Path) -> Path:
    """Write a file again, with a number of heads for each layer: 0 for those without attention. Returns its path."""
    from gguf import GGUFReader

    reader, into = GGUFReader(path), path.with_suffix(".by-layer.gguf")
    fields = {field.name.partition(".")[2]: field.contents() for field in reader.fields.values()}
    n_heads, of_keys = fields["attention.head_count"], fields["attention.head_count_kv"]
    usual = [not n for n in of_keys] if isinstance(of_keys, list) else [False] * fields["block_count"]
    heads = [0 if recurrent else n_heads for recurrent in fields.get("attention.recurrent_layers", usual)]
    _write_again(reader, into, {f"{fields['architecture']}.attention.head_count": heads})
    return into


def _write_again(
    reader: "GGUFReader", into: Path, changed: Mapping[str, Any], left_out: Callable[[str], bool] = lambda tensor: False
) -> None:
    """Write a GGUF with other texts, numbers or lists of numbers in some fields, and without some tensors."""
    from gguf import GGUFValueType

    from llama_meter.models.gguf_file import writing

    kept = {field.name: (field.contents(), field.types[0], field.types[-1]) for field in reader.fields.values()}
    for name, value in changed.items():
        kind = GGUFValueType.get_type(value)
        kept[name] = (value, GGUFValueType.UINT32 if isinstance(value, int) else kind, GGUFValueType.UINT32)
    with writing(into, kept["general.architecture"][0]) as writer:
        for name, (value, kind, of_each) in kept.items():
            if not name.startswith("GGUF.") and name != "general.architecture" and value != []:
                writer.add_key_value(name, value, kind, of_each if kind == GGUFValueType.ARRAY else None)
        for tensor in reader.tensors:
            if not left_out(re.sub(r"^blk\.\d+\.", "", tensor.name)):
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


TIMES = 30.0  # tolerance: so many times the rounding of the sequence alone, but at least
LEAST = {"F32": 5e-4, "F16": 2e-3, "Q8_0": 2e-2}  # by type. Kernels at 17 slots: up to 2e-4; activations that round
AGAIN = 5.0  # times that, where keys that are kept in F16 are rotated once more


def tolerance(question: str, rounding: float, dtype: str = "F32", gpu: bool = False) -> float:
    """Largest relative error of logits that rounding explains.

    On a GPU, F32 counts as F16: CUDA multiplies 4 to 16 columns in TF32, whose mantissa is as short (ggml-cuda/mmf.cu).
    """
    least = LEAST["F16" if gpu and dtype == "F32" else dtype]
    return max(least, TIMES * rounding) * (AGAIN if question == "shifted" else 1)
