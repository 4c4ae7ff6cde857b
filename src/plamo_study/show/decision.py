"""What a machine's page says first: the command to run, its file, slots and context, what binds it, and how sure it is.

A request has `prompt` tokens in and `answer` tokens out. Nothing is recommended from disturbed rows or from fewer
than FEW processes; what is not told apart is "either".
"""

import shlex
from collections.abc import Mapping
from typing import Any

import pandas as pd

from llama_meter.stats import FEW, Estimate, selected
from plamo_study.arithmetic import roofline
from plamo_study.laws import quality
from plamo_study.read.recording import read
from plamo_study.show.findings import figure, name, number
from plamo_study.stats.estimates import compare

ENOUGH = 0.95  # of the best gain: fewer slots that come so near are chosen, for every user's speed is higher
SLOWER = 1.25  # times as long a file may take, by all of its interval, that is chosen because it loses less
STEP = 1024  # tokens that a context is rounded up to
Model = dict[str, Any]


def losses(facts: Mapping[str, Model]) -> dict[str, float]:
    """Distance from F16, in thousandths of a nat a token, of files whose model has a small trained namesake here.

    By the reference's quality rows (chapter 5): mean KL divergence on held-out text.
    """
    part = read("05-quality", "recorded", "mini")
    table = quality.table(part.rows) if part else pd.DataFrame(columns=["model", "file", "kld"])
    known = {
        (row.model.rstrip("*"), row.file): 0.0 if row.file == "F16" else 1e3 * row.kld.value
        for row in table.itertuples()
    }
    return {file: known.get((fact.get("like", fact["name"]), fact["dtype"]), float("nan"))
            for file, fact in facts.items()}  # fmt: skip


def ranked(whole: pd.DataFrame, loss: Mapping[str, float]) -> pd.DataFrame:
    """Files of a model, the fastest first: `file`, `dtype`, `value` (seconds), `n` processes, `over`, `kind`, `loss`.

    `whole`: seconds of the request by block. `over`: an Estimate of a file's seconds over the fastest's, by paired
    blocks, selected among all. `kind`: "least", "longer", "alike", or "few" pairs.
    """
    files = whole.groupby(["file", "dtype"]).value.agg(["median", "size"]).sort_values("median").reset_index()
    files.columns = pd.Index(["file", "dtype", "value", "n"])
    over: list[Estimate | None] = [None]
    kinds = ["least"]
    for dtype in files.dtype[1:]:
        pair = compare(whole, of=f"dtype == '{dtype}'", to=f"dtype == '{files.dtype[0]}'", by="model")
        ratio = selected(pair.estimate.iloc[0], len(files) - 1)
        over.append(ratio)
        kinds.append("few" if ratio.n < FEW else "longer" if ratio.low > 1 else "alike")
    return files.assign(over=over, kind=kinds, loss=files.file.map(loss))


def chosen(files: pd.DataFrame) -> Any:
    """The line of the file to run: the fastest, or one at most SLOWER times as long that loses less; None for few."""
    if files.n.iloc[0] < FEW:
        return None
    near = [over is None or (over.n >= FEW and over.high <= SLOWER) for over in files.over]
    return next(files[near].sort_values(["loss", "value"]).itertuples())


def slots(gains: pd.DataFrame, users: int, safe: bool | None) -> int:
    """Requests at once: 1 unless users may share this build, else the fewest that come within ENOUGH of the best gain.

    `gains`: of one file, `n_seq`, `value` and whether it is `clear`.
    """
    good = gains[gains.clear & gains.n_seq.le(users)] if safe else gains.head(0)
    return int(good[good.value >= ENOUGH * good.value.max()].n_seq.min()) if len(good) else 1


def _room(tokens: int) -> int:
    """Tokens of a slot's context."""
    return -(-tokens // STEP) * STEP


def command(path: str, n: int, tokens: int, row: pd.Series) -> str:
    """llama-server with these slots of `tokens` tokens each; `row`: a cell's settings."""
    words = ["llama-server", "-m", shlex.quote(path), f"-np {n}", f"-c {n * _room(tokens)}", f"-t {row.n_threads}"]
    words += [f"-ngl {99 if row.n_gpu_layers < 0 else row.n_gpu_layers}"] if row.n_gpu_layers else []
    words += [f"{flag} {kind}" for flag, kind in (("-ctk", row.type_k), ("-ctv", row.type_v)) if kind != "f16"]
    return " ".join(words)


def context(fact: Model, n: int, tokens: int) -> str:
    """What slots of this file take besides its weights, by arithmetic; n/a for what is not counted."""
    if "uncounted" in fact:
        return f"n/a: {fact['uncounted']}, so its cache is not computed."
    _, sliding, full = roofline.layers(fact)
    each, state = (sliding + full) * roofline.kv_bytes_per_token(fact), roofline.state_bytes(fact)
    whole = n * (state + _room(tokens) * each)
    fixed = f"{number(state / 1e6)} MB and " if state else ""
    return f"a slot takes {fixed}{number(each / 1e3)} KB a token, so this one needs {number(whole / 1e9)} GB for it."


def warning(arch: str, safe: bool | None) -> str:
    """What to know before users share a server of this architecture on this build; "" where they may."""
    if safe:
        return ""
    if safe is None:
        return (
            f"Nobody asked whether users may share a server of {name(arch)} on this build (chapter 10). Keep `-np 1` "
            "until `plamo-study probe` finds its answers right."
        )
    return f"**Keep `-np 1` for {name(arch)}.** This build mixes the prompts of users who share a server (chapter 4)."


def sure(files: pd.DataFrame, best: Any) -> str:
    """How far the files of a model were told apart."""
    if best is None:
        return (
            f"not yet: that takes {FEW} quiet processes of a file. The same command goes on when the machine is idle."
        )
    if len(files) == 1:
        return "one type was measured; give files of several to compare them."
    alike = [kind for kind in files.dtype[files.kind.isin(["least", "alike"])] if kind != best.dtype]
    said = [f"{best.dtype} and {' and '.join(alike)} are not told apart: either"] if alike else []
    said += [f"{row.dtype} takes {figure({'estimate': row.over})} times as long as {files.dtype[0]}"
             for row in files.itertuples() if row.kind in ("longer", "alike")]  # fmt: skip
    few = list(files.dtype[files.kind == "few"])
    return "; ".join(said + ([f"too few quiet pairs to say of {', '.join(few)}"] if few else [])) + "."
