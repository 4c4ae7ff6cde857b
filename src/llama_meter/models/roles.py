"""What a GGUF is for: writing text from left to right, something else, or a part of a model only."""

import re
from pathlib import Path

from llama_meter.models.finding import Finding, block
from llama_meter.models.header import Header

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # as llama-gguf-split names parts
MOST_PARTS = 1 << 16
RANKS = 4  # llama.h, LLAMA_POOLING_TYPE_RANK
DIFFUSES = ("dream", "llada", "rnd1")  # architectures begin so, or a key is `diffusion.…`
EMBEDS = re.compile(r"bert|embedding|llama-embed|t5encoder")
NO_MODELS = {  # general.type, or an architecture that is no language model -> what the file is
    "adapter": "a LoRA adapter",
    "imatrix": "an importance matrix",
    "controlvector": "a control vector",
    "mmproj": "a projector of images or sound",
    "clip": "a projector of images or sound",
}


def not_a_model(header: Header) -> Finding | None:
    """The one finding for a GGUF that holds no whole language model, and what it is; None for all others."""
    role = header.text("general.type") or ""
    if any(tensor.name.endswith(".lora_a") for tensor in header.tensors):
        role = "adapter"
    number, count = split_of(header)
    if what := NO_MODELS.get(role) or NO_MODELS.get(header.arch):
        return block("no-model", f"is {what}, no model", "name the language model that it was made for")
    if count > 1:
        why = f"is part {number} of {count}: only whole files are checked"
        return block("split", why, "llama-gguf-split --merge FIRST-PART OUT.gguf, then use OUT.gguf")
    if not header.tensors:
        return block("no-model", "holds no weights", "name the file with the weights of that model")
    return None


def not_judged(header: Header) -> str:
    """What a model is for that does not write text from left to right, and what follows; "" for one that does.

    The engine's own test holds pieces of a text against the whole, which agree only where no token sees later ones.
    """
    arch = header.arch
    begins = {tensor.name.partition(".")[0] for tensor in header.tensors}
    pooling, causal = header.number(f"{arch}.pooling_type"), header.number(f"{arch}.attention.causal")
    if pooling == RANKS or "cls" in begins:
        return "a reranking model: it scores texts, not measured"
    if {"enc", "dec"} <= begins:
        return "an encoder with a decoder: it reads the whole text before it writes, not measured"
    if pooling or EMBEDS.search(arch) or "enc" in begins:
        return "an embedding model: it embeds and writes nothing, not measured"
    if arch.startswith(DIFFUSES) or any(key.startswith("diffusion.") for key in header.fields):
        return "a diffusion model: it attends both ways, not judged"
    return "a model that attends both ways, not judged" if causal == 0 else ""


def split_of(header: Header) -> tuple[int, int]:
    """Which part of how many a file is, from 1: (1, 1) for a whole one, and where its keys make no sense."""
    count, number = header.number("split.count") or 1, header.number("split.no") or 0
    if not (1 < count < MOST_PARTS and 0 <= number < count):
        return 1, 1
    return int(number) + 1, int(count)


def named_parts(path: Path, count: int) -> list[Path]:
    """All parts of a split file beside `path`, by its name; none where the name is no part's."""
    name = PART.fullmatch(path.name)
    return [path.with_name(f"{name[1]}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)] if name else []
