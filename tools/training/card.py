"""The record of the trainings (data/models/training.json) and the model card written from it, number by number.

It computes nothing, and is importable without PyTorch.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_meter import paths

RECORD = paths.DATA / "models" / "training.json"
CARD = paths.DATA / "models" / "README.md"

TEMPLATE = """\
# Embedded models

Two small language models in the architectures of PLaMo 2 and PLaMo 3 as llama.cpp runs them. They are here so that
quantization has something to lose: a random model shows speed and no quality. They are **not** PLaMo's weights, have
seen nothing but Python, and answer nothing.

This file is written from `training.json` by `python tools/train.py`.

{models}

Bits per byte: the total of -log2 p over all tokens of the held-out modules, each behind its own bos, in windows of
{window} tokens without overlap, divided by their UTF-8 bytes; F16 file, evaluated by the engine on CPU.

## What they have to beat

{baselines}

The n-gram models are counted on the training part and interpolated by Witten-Bell down to equal chances. The two
compressors see the held-out text alone.

## Data

The standard library of Python {python}: {train_modules:,} modules, {train_bytes:,} bytes, {train_tokens:,} tokens for
training; {held_modules} modules, {held_bytes:,} bytes held out, chosen by a hash of the module's path
(`data/corpus/python-heldout.txt`). Left out: test suites, installed packages, files that are mostly tables of
literals, files that are not UTF-8, exact duplicates. One vocabulary for both: {n_vocab} tokens (5 special, 256 bytes,
unigram pieces learnt on the training part).

Contamination: {seen:.1%} of the held-out lines of at least 40 characters also stand in the training part (licence
headers, repeated idioms and copied code). They were left in.

SHA-256 of the training part: `{train_sha256}`
SHA-256 of the held-out part: `{held_sha256}`

## Training

{training}

Every step sees {batch:,} tokens: {stages}.
Muon for the blocks' matrices, AdamW for the rest, rates falling linearly to zero over the last {cool_down:.0%} of the
steps, bfloat16 autocast, one thread. Wall time is that of a machine with other work. Same seed and data give the same
curve up to floating-point rounding; `training.json` holds it.

## Greedy continuations

Small models that always take the likeliest token end in loops; that too is something quantization changes.

{continuations}

A prompt has to end where a token may end: pieces span a line's end and the next line's indentation, so a prompt that
ends with a bare line's end makes an unlikely token, behind which the models lose the indentation.

## Again

    pip install -e '.[train]'
    {commands}

It needs the same Python release for the same corpus. An interrupted training goes on where its last checkpoint was
written. Afterwards put the printed hashes into `data/models.toml`.

## Licence and limits

The text is the Python Software Foundation's and its contributors', under the PSF licence
(`data/corpus/PYTHON-LICENSE.txt`); the weights are under this repository's MIT licence. Long stretches may be
recited from the training text. Nothing learnt here about quality carries over to the released models in size, only
in method: they are hundreds to thousands of times larger and were trained on other text.
"""


def read(path: Path = RECORD) -> dict[str, Any]:
    """The record, empty when there is none."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def write(record: dict[str, Any], path: Path = RECORD, to: Path = CARD) -> None:
    """Write the record and the card."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    to.write_text(render(record), encoding="utf-8")


def render(record: dict[str, Any]) -> str:
    """The model card of a record."""
    models, data = record["models"], record["corpus"]
    recipe = next(iter(models.values()))["recipe"]
    return TEMPLATE.format(
        models=_models(models),
        window=f"{next(iter(models.values()))['window']:,}",
        baselines=_table(("baseline", "bits per byte"), [(n, f"{b:.2f}") for n, b in record["baselines"].items()]),
        python=data["python"],
        train_modules=data["train"]["modules"],
        train_bytes=data["train"]["bytes"],
        train_tokens=data["train"]["tokens"],
        held_modules=data["held_out"]["modules"],
        held_bytes=data["held_out"]["bytes"],
        n_vocab=f"{record['vocabulary']['tokens']:,}",
        seen=data["seen_before"],
        train_sha256=data["train_sha256"],
        held_sha256=data["held_out_sha256"],
        training=_training(models),
        batch=recipe["batch"],
        stages=", ".join(f"{share:.0%} in windows of {window:,}" for share, window in recipe["stages"]),
        cool_down=recipe["cool_down"],
        continuations="\n\n".join(_continuation(name, model) for name, model in models.items()),
        commands="\n    ".join(f"python tools/train.py {name}" for name in models),
    )


def _models(models: dict[str, Any]) -> str:
    rows = [
        (f"`{m['file']}`", f"{m['parameters']:,}", f"{m['bytes']:,}", f"**{m['bits_per_byte']:.3f}**")
        for m in models.values()
    ]
    return _table(("file", "parameters", "bytes", "bits per byte, held out"), rows)


def _training(models: dict[str, Any]) -> str:
    rows = [
        (
            name,
            f"{m['step']:,}",
            f"{m['tokens_seen']:,}",
            f"{m['seconds'] / 60:.0f} min",
            str(m["recipe"]["seed"]),
            f"PyTorch {m['torch']}",
        )
        for name, m in models.items()
    ]
    return _table(("model", "steps", "tokens seen", "wall time", "seed", "with"), rows)


def _continuation(name: str, model: dict[str, Any]) -> str:
    text = (model["prompt"] + model["continuation"]).rstrip()
    return f"{name}, behind `{model['prompt'].splitlines()[0]}` and its docstring:\n\n```python\n{text}\n```"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" if i == 0 else "---:" for i in range(len(head))), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
