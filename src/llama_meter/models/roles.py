"""What a GGUF is that holds no whole model: an adapter, a projector, a matrix, a vocabulary, one part of several."""

import re
from pathlib import Path

from llama_meter.models.finding import Finding, block, listed
from llama_meter.models.header import Header

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # as llama-gguf-split names parts
MOST_PARTS = 1 << 16
RANKS = 4  # llama.h, LLAMA_POOLING_TYPE_RANK
DIFFUSES = ("dream", "llada", "rnd1")  # architectures begin so, or a key is `diffusion.…`
EMBEDS = re.compile(r"bert|embedding|llama-embed|t5encoder")
ROLES = {  # general.type, or an architecture that is no language model -> what the file is, and what to do with it
    "adapter": (
        "a LoRA adapter",
        "merge it first: llama-export-lora -m BASE.gguf --lora FILE -o OUT.gguf, then use OUT.gguf",
    ),
    "imatrix": ("an importance matrix", "name the model that it was made for"),
    "mmproj": ("a projector of images or sound", "name the language model that it came with"),
    "clip": ("a projector of images or sound", "name the language model that it came with"),
    "controlvector": ("a control vector", "name the model that it is applied to"),
}


def not_a_model(header: Header) -> Finding | None:
    """The one finding for a GGUF that holds no whole language model, what it is and what to do; None for all others."""
    role, arch = header.text("general.type") or "", header.text("general.architecture") or ""
    names = [tensor.name for tensor in header.tensors]
    if any(name.endswith((".lora_a", ".lora_b")) for name in names):
        role = "adapter"
    elif names and all(name.endswith((".in_sum2", ".counts")) for name in names):
        role = "imatrix"
    if entry := ROLES.get(role) or ROLES.get(arch):
        return block(f"no-model-{role if role in ROLES else arch}", f"is {entry[0]}, no model", entry[1])
    number, count = split_of(header)
    if count > 1:
        return _part(header.path, number, count)
    if not names:
        what = "only a vocabulary" if "tokenizer.ggml.tokens" in header.records else "no tensors"
        return block("no-weights", f"holds {what}, and no weights", "name the file with the weights of that model")
    return None


def not_judged(header: Header) -> str:
    """What a model is for that does not write text from left to right, and what follows; "" for one that does.

    The engine's own test holds pieces of a text against the whole, which agree only where no token sees later ones.
    """
    arch, keys = header.text("general.architecture") or "", header.records
    begins = {tensor.name.partition(".")[0] for tensor in header.tensors}
    pooling, causal = header.number(f"{arch}.pooling_type"), header.number(f"{arch}.attention.causal")
    if pooling == RANKS or "cls" in begins:
        return "a reranking model: it scores texts, not measured"
    if {"enc", "dec"} <= begins:
        return "an encoder with a decoder: it reads the whole text before it writes, not measured"
    if pooling or EMBEDS.search(arch) or "enc" in begins:
        return "an embedding model: it embeds and writes nothing, not measured"
    if arch.startswith(DIFFUSES) or any(key.startswith("diffusion.") for key in keys):
        return "a diffusion model: it attends both ways, not judged"
    return "a model that attends both ways, not judged" if causal == 0 else ""


def split_of(header: Header) -> tuple[int, int]:
    """Which part of how many a file is, from 1: (1, 1) for a whole one, and where its keys make no sense."""
    count, number = header.number("split.count") or 1, header.number("split.no") or 0
    if not (1 < count < MOST_PARTS and 0 <= number < count):
        return 1, 1
    return int(number) + 1, int(count)


def _part(path: Path, number: int, count: int) -> Finding:
    parts = named_parts(path, count)
    missing = [part.name for part in parts if not part.is_file()]
    first = parts[0] if parts else "FIRST-PART"
    why, mend = f"is part {number} of {count}", f"llama-gguf-split --merge {first} OUT.gguf, then use OUT.gguf"
    if missing:
        why = f"{why}; not beside it: {listed(missing)}"
        return block("split", why, f"fetch them, then {mend}")
    return block("split", f"{why}: only whole files are checked", mend)


def named_parts(path: Path, count: int) -> list[Path]:
    """All parts of a split file beside `path`, by its name; none where the name is no part's."""
    name = PART.fullmatch(path.name)
    return [path.with_name(f"{name[1]}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)] if name else []
