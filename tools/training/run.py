"""From the standard library to an embedded model: corpus, vocabulary, training, file, record, model card.

It holds the recipes of the committed models, not the training algorithm.
"""

import platform
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from llama_meter import paths
from llama_meter.errors import StudyError
from llama_meter.models import embedded, recipes, registry, tensors
from llama_meter.models.registry import ModelSpec
from llama_meter.models.vocabulary import Vocabulary
from training import baselines, card, corpus, export, optimise, pieces, scoring, tokens
from training.architectures import Plamo
from training.optimise import Progress, Recipe

RECIPES = {
    "plamo-2-1b": Recipe(steps=2300),
    "plamo-3-nict-2b": Recipe(steps=2000),
    "plamo-2-draft": Recipe(steps=1500),
    "plamo-3-draft": Recipe(steps=1500),
}
WORK = paths.MODELS / "training"  # checkpoints and the vocabulary, until they are deleted
HELD_OUT = paths.DATA / "corpus" / "python-heldout.txt"
PROSE = paths.DATA / "corpus" / "english-heldout.txt"
EVERY = 200  # steps between two points of the learning curve

Tell = Callable[[str], None]


def train(name: str, tell: Tell, steps: int = 0, work: Path = WORK) -> Path:
    """Train the mini of a model, put it among the models, record it and write the card; returns the file's path.

    An interrupted training in `work` is resumed. `steps` shortens the recipe. `tell` receives status lines.
    Raises StudyError for a model without a recipe.
    """
    if name not in RECIPES:
        raise StudyError(f"model {name!r}", f"has no recipe; known: {', '.join(RECIPES)}", "plamo-study models list")
    torch.set_num_threads(1)
    work.mkdir(parents=True, exist_ok=True)
    recipe = replace(RECIPES[name], steps=steps) if steps else RECIPES[name]
    spec, found = registry.spec(name, "mini"), corpus.modules()
    train_part, held_out = corpus.split(found)
    vocabulary = pieces.kept(work / "vocabulary.json", train_part, spec.vocab)
    stream = np.concatenate(tokens.streams(train_part, spec, vocabulary))
    held_streams = tokens.streams(held_out, spec, vocabulary)
    n_bytes, draft = sum(module.n_bytes for module in held_out), work / f"{name}.F16.gguf"

    def report(model: Plamo, progress: Progress) -> None:
        step, seconds, bits, held_bits = progress.curve[-1]
        export.write(spec, weights(model), vocabulary, draft)
        tell(
            f"{name} step {step}/{recipe.steps}, {seconds:,.0f} s: {bits:.3f} bits per token, held out {held_bits:.4f}"
        )

    progress = optimise.train(
        model := Plamo(spec, recipe.seed),
        stream,
        recipe,
        lambda model: optimise.bits(model, held_streams) / n_bytes,
        work / f"{name}.checkpoint",
        EVERY,
        report,
    )
    path = export.write(spec, weights(model), vocabulary, recipes.model_path(name, "mini", embedded.SOURCE))
    HELD_OUT.write_bytes("".join(module.text for module in held_out).encode())
    PROSE.write_bytes(corpus.prose(held_out).encode())
    keep(path, spec, recipe, progress, (train_part, held_out, len(stream), vocabulary))
    return path


def weights(model: Plamo) -> dict[str, NDArray[np.float32]]:
    """A model's parameters as the file holds them, by tensor name."""
    found = {name: model.tensor(name).detach().float().numpy() for name in model.spec.tensor_shapes()}
    return {name: -np.exp(x) if name.endswith(".ssm_a") else x for name, x in found.items()}


def load(spec: ModelSpec, path: Path) -> Plamo:
    """The model of a file as a PyTorch module: the reverse of `weights`."""
    model = Plamo(spec)
    with torch.no_grad():
        for stored in gguf.GGUFReader(path).tensors:
            values = torch.from_numpy(np.array(stored.data, np.float32))
            model.tensor(stored.name).copy_((-values).log() if stored.name.endswith(".ssm_a") else values)
    return model


def keep(
    path: Path,
    spec: ModelSpec,
    recipe: Recipe,
    progress: Progress,
    data: tuple[list[corpus.Module], list[corpus.Module], int, Vocabulary],
) -> None:
    """Score the file, and enter everything into the record and the card."""
    train_part, held_out, n_tokens, vocabulary = data
    record: dict[str, Any] = card.read()
    record["corpus"] = _corpus(train_part, held_out, n_tokens)
    record["vocabulary"] = {"tokens": len(vocabulary.tokens), "learner": f"tokenizers {version('tokenizers')}"}
    train_text, held_text = ("".join(module.text for module in part).encode() for part in (train_part, held_out))
    by_order = baselines.ngram(train_text, held_text)
    record["baselines"] = {f"byte {n}-gram": bits for n, bits in by_order.items()} | baselines.compressors(held_text)
    record.setdefault("models", {})[spec.name] = _model(path, spec, recipe, progress, held_out)
    card.write(record)


def _corpus(train_part: list[corpus.Module], held_out: list[corpus.Module], n_tokens: int) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "train": {"modules": len(train_part), "bytes": sum(m.n_bytes for m in train_part), "tokens": n_tokens},
        "train_sha256": corpus.sha256(train_part),
        "held_out": {"modules": len(held_out), "bytes": sum(m.n_bytes for m in held_out)},
        "held_out_sha256": corpus.sha256(held_out),
        "held_out_modules": [[module.path, module.n_bytes] for module in held_out],
        "seen_before": corpus.seen_before(train_part, held_out),
    }


def _model(
    path: Path, spec: ModelSpec, recipe: Recipe, progress: Progress, held_out: list[corpus.Module]
) -> dict[str, Any]:
    texts = [module.text for module in held_out]
    return {
        "file": path.name,
        "bytes": path.stat().st_size,
        "sha256": tensors.sha256(path),
        "parameters": spec.n_params,
        "bits_per_byte": scoring.bits_per_byte(path, texts),
        "window": scoring.WINDOW,
        "recipe": asdict(recipe),
        **asdict(progress),
        "torch": version("torch"),
        "platform": sysconfig.get_platform(),
        "prompt": scoring.PROMPT,
        "continuation": scoring.continuation(path),
    }


def pins(name: str) -> dict[str, str]:
    """SHA-256 by type of an embedded model's files, rewritten in a temporary folder, for data/models.toml."""
    from tempfile import TemporaryDirectory

    spec, source = registry.spec(name, "mini"), recipes.model_path(name, "mini", embedded.SOURCE)
    with TemporaryDirectory() as folder:
        make = partial(embedded.convert, spec, source)
        files = {d: make(Path(folder) / f"{d}.gguf", d) for d in registry.DTYPES if d != embedded.SOURCE}
        found: Mapping[str, Path] = {embedded.SOURCE: source} | files
        return {dtype: tensors.sha256(found[dtype]) for dtype in registry.DTYPES}
