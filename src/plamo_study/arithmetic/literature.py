"""Other people's figures (data/published): parts, processors' peaks, and the sources' printed numbers recomputed.

A peak is cores x operations per core and cycle x clock, a multiply-add counted as two. Where no clock was recorded with
the rows, the peak is unknown; the highest clock the processor is sold with then bounds it. No GPU is covered.

Each printed figure names a formula here and what to put into it (source-tables.toml). A source counts a model by its
nominal number of parameters; `counted` takes the real shape instead, with head, attention and a cache of `DEPTH` tokens
per sequence. Only arithmetic is checked: a printed time that it allows may still be wrong.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from llama_meter import paths
from llama_meter.errors import StudyError
from plamo_study.arithmetic import roofline
from plamo_study.arithmetic.ceilings import Kernel, Rate
from plamo_study.arithmetic.roofline import Band, Ceilings, Model

INSTRUCTIONS = {"F32": "F32", "F16": "F32", "BF16": "BF16"}  # weights -> instruction; blocks of integers: INT8
AGREE = 0.05  # relative difference up to which figures agree, since printed ones are rounded
DEPTH = 1024  # tokens cached per sequence where a cache is counted; the sources name no depth
SIZE = {"F16": 2, "INT8": 1}  # bytes a weight
ZEROS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "window", "mamba_heads", "mamba_head_dim",
         "d_state", "d_conv")  # fmt: skip
Entry = Mapping[str, Any]


def parts() -> list[dict[str, Any]]:
    """Parts with their published bandwidth, memory and peaks, each with its sources."""
    entries: list[dict[str, Any]] = _toml("hardware.toml")["part"]
    return entries


def cores() -> list[dict[str, Any]]:
    """Operations per cycle of the cores of the processors measured here, with sources."""
    entries: list[dict[str, Any]] = _toml("hardware.toml")["core"]
    return entries


def part(name: str) -> dict[str, Any]:
    """The part whose name begins with `name`."""
    return next(entry for entry in parts() if entry["name"].startswith(name))


def printed() -> dict[str, Any]:
    """The sources' figures, the models they calculate with, and the sources' names."""
    return _toml("source-tables.toml")


def _toml(name: str) -> dict[str, Any]:
    path = paths.PUBLISHED / name
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise StudyError(str(path), f"cannot be read ({error})", "git checkout data/published") from error


@dataclass(frozen=True)
class Peak:
    """Operations per second: the `value` at a recorded clock, or None with `why`; `most`: at the highest clock sold."""

    value: float | None
    most: float | None
    why: str


def peak(
    cores: Sequence[Entry], machine: Entry, engine: Entry, n_threads: int, dtype: str, clock: float | None
) -> Peak:
    """The peak of `n_threads` cores for the instruction that multiplies a type of weights; `clock` in Hz.

    `cores` is the [[core]] part of hardware.toml, `machine` and `engine` are facts.
    """
    unit = INSTRUCTIONS.get(dtype, "INT8")
    core = next((core for core in cores if core["chip"] == machine["chip"]), None)
    if core is None:
        return Peak(None, None, "no figure for this processor")
    if unit not in core["per_cycle"] or core["needs"][unit] not in engine["build"]:
        return Peak(None, None, f"no figure for its {unit} instruction")
    per_second = min(n_threads, machine["performance_cores"]) * core["per_cycle"][unit]
    if clock is None:
        return Peak(None, per_second * core["highest_clock"], "no clock recorded")
    return Peak(per_second * clock, per_second * clock, "")


def clock(rows: pd.DataFrame) -> float | None:
    """Median clock in Hz of the rows that recorded one (`mhz`, where the system reports it), else None."""
    clocks = rows["mhz"].dropna() if "mhz" in rows else pd.Series(dtype=float)
    return float(np.median(clocks)) * 1e6 if len(clocks) else None


def kernels(measured: Mapping[Kernel, Rate], peaks: Mapping[str, Peak]) -> pd.DataFrame:
    """Kernels of a place, the fastest first: `name`, `best` and `usual` FLOP/s, shares `of_fastest` and `of_peak`.

    `of_peak` is None where no clock was recorded, with `why`; `at_least` is then the share of the peak at the highest
    clock, a lower bound. `peaks` by tensor type.
    """
    ordered = sorted(measured.items(), key=lambda item: -item[1].best)
    entries = []
    for kernel, rate in ordered:
        limit = peaks[kernel.dtype]
        entry: dict[str, Any] = {"name": kernel.name, "best": rate.best, "usual": rate.usual, "why": limit.why}
        entry |= {"of_fastest": rate.best / ordered[0][1].best}
        entry |= {"of_peak": rate.best / limit.value if limit.value else None}
        entries.append(entry | {"at_least": rate.best / limit.most if limit.most else None})
    return pd.DataFrame(entries, columns=["name", "best", "usual", "why", "of_fastest", "of_peak", "at_least"])


def nominal(parameters: float, size: float) -> Model:
    """A model of `parameters` weights of `size` bytes each and nothing else: no cache, no separate head."""
    weights = {"type": "", "count": 1, "n_elements": parameters, "n_bytes": parameters * size}
    return {"shape": dict.fromkeys(ZEROS, 0), "tensors": {"weights": weights}}


def dense(geometry: Mapping[str, Any], size: float) -> Model:
    """A Llama-shaped model (gated FFN, grouped keys and values, untied head) with `size` bytes a weight."""
    wide, deep, ffn = geometry["hidden"], geometry["layers"], geometry["ffn"]
    rows = {
        "attn_qkv": (geometry["heads"] + 2 * geometry["kv_heads"]) * geometry["head_dim"] * wide * deep,
        "attn_output": geometry["heads"] * geometry["head_dim"] * wide * deep,
        "ffn_up": 2 * ffn * wide * deep,
        "ffn_down": ffn * wide * deep,
        "token_embd": geometry["vocab"] * wide,
        "output": geometry["vocab"] * wide,
    }
    tensors = {kind: {"type": "", "count": deep, "n_elements": n, "n_bytes": n * size} for kind, n in rows.items()}
    return {"shape": dict.fromkeys(ZEROS, 0) | dict(geometry), "tensors": tensors}


@dataclass(frozen=True)
class Case:
    """A printed figure and its inputs: its entry, the hardware part, and the geometry (`real`: counted in full)."""

    entry: Entry
    part: Mapping[str, Any]
    geometry: Mapping[str, Any]
    real: bool = False

    def get(self, name: str, default: float) -> float:
        """A number from the entry."""
        return float(self.entry.get(name, default))

    @property
    def type(self) -> str:
        """Type of the weights."""
        return str(self.entry.get("type", "F16"))

    def model(self, size: float) -> Model:
        """The model of the entry."""
        return dense(self.geometry, size) if self.real else nominal(self.geometry["parameters"], size)

    def ceilings(self, dtype: str) -> Ceilings:
        """Combined ceilings of all parts, in bytes and FLOPs per second."""
        n = self.get("parts", 1)
        return Ceilings(read=n * self.part["bandwidth"], matmul=n * self.part["peak"][dtype])

    def account(self, dtype: str) -> tuple[float, float]:
        """(FLOPs, bytes) of one pass: `tokens` of a prompt, or one token each of `sequences`."""
        tokens, n_seq = int(self.get("tokens", 1)), int(self.get("sequences", 1))
        depth = DEPTH if self.real and tokens == 1 else 0
        return roofline.work(roofline.parts(self.model(SIZE[dtype]), tokens, depth, n_seq, n_ubatch=max(tokens, n_seq)))

    def band(self, dtype: str = "") -> Band:
        """Seconds of that pass."""
        dtype = dtype or self.type
        return roofline.band(*self.account(dtype), self.ceilings(dtype))

    @property
    def weights_per_second(self) -> float:
        """Tokens per second if only compute counted: 2 FLOPs a weight."""
        return self.ceilings(self.type).matmul / 2 / float(self.geometry["parameters"])


def _attention_flops(case: Case) -> float:
    if case.real:
        account = roofline.parts(case.model(2), int(case.get("tokens", 1)))
        return next(part.flops for part in account if part.name == "keys and values read")
    shape = case.geometry
    return float(4 * shape["layers"] * shape["heads"] * shape["head_dim"] * case.get("tokens", 1) ** 2)


def _attention_memory(case: Case) -> float:
    shape, n = case.geometry, case.get("tokens", 1)
    heads = 2 * shape["heads"] + 2 * (shape["kv_heads"] if case.real else shape["heads"])
    scores = shape["heads"] * n * n if case.entry.get("scores") else 0
    return float(SIZE[case.type] * (heads * n * shape["head_dim"] + scores))


def _transfer(case: Case) -> float:
    per_token = roofline.kv_bytes_per_token(dense(case.geometry, 2)) * case.geometry["layers"]
    return float(per_token * case.get("tokens", 1) / (case.get("bits", 8) / 8))


def _weights(case: Case) -> float:
    return float(sum(tensor["n_bytes"] for tensor in dense(case.geometry, SIZE[case.type])["tensors"].values()))


def _layer(case: Case) -> float:
    model = dense(case.geometry, SIZE[case.type])
    return float((roofline.weight_bytes(model) - roofline.head_bytes(model)) / case.geometry["layers"])


def _balance(case: Case) -> float:
    limit = case.ceilings(case.type)
    return limit.matmul / limit.read


Formula = Callable[[Case], float]
FORMULAS: dict[str, Formula] = {
    "intensity": lambda case: case.account(case.type)[0] / case.account(case.type)[1],
    "balance": _balance,
    "balance_batch": lambda case: _balance(case) * SIZE[case.type] / 2,
    "decode_utilisation": lambda case: case.band().compute / case.band().low,
    "utilisation": lambda case: case.band().compute / case.band().low,
    "waiting": lambda case: 1 - case.band().compute / case.band().memory,
    "decode_rate": lambda case: case.get("sequences", 1) / case.band().low,
    "pass_rate": lambda case: case.get("tokens", 1) / case.band().low,
    "compute_rate": lambda case: case.weights_per_second,
    "share_of_compute": lambda case: case.get("rate", 0) / case.weights_per_second,
    "rate_of_step": lambda case: case.get("sequences", 1) / case.get("step", 1),
    "step_time": lambda case: case.band().low,
    "read_time": lambda case: case.band().memory,
    "compute_time": lambda case: case.band().compute,
    "gain": lambda case: case.band("F16").low / case.band("INT8").low,
    "weights": _weights,
    "layer_bytes": _layer,
    "square": lambda case: float(case.geometry["hidden"] ** 2 * SIZE[case.type]),
    "attention_flops": _attention_flops,
    "attention_time": lambda case: _attention_flops(case) / case.ceilings(case.type).matmul,
    "attention_memory": _attention_memory,
    "launches": lambda case: case.geometry["layers"] * case.get("kernels", 1) * case.get("each", 0),
    "transfer": _transfer,
    "quotient": lambda case: case.get("top", 1) / case.get("bottom", 1),
    "speedup": lambda case: case.get("top", 1) / case.get("bottom", 1) - 1,
    "product": lambda case: case.get("left", 1) * case.get("right", 1),
}
REAL = ("intensity", "decode_rate", "step_time", "gain", "pass_rate", "read_time", "attention_flops",
        "attention_time", "attention_memory")  # fmt: skip


def checked(printed: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Every printed figure with `ours`, `counted` (None where nothing more counts), `quotient` and `verdict`.

    `printed` is the content of source-tables.toml, `parts` that of hardware.toml; the sources calculate with an H100.
    """
    h100 = next(part for part in parts if part["name"].startswith("H100"))
    return pd.DataFrame([_checked(entry, h100, printed) for entry in printed["figure"]])


def _checked(entry: Entry, part: Mapping[str, Any], printed: Mapping[str, Any]) -> dict[str, Any]:
    geometry = printed["model"][entry.get("model", "70B")]
    formula, value = FORMULAS[entry["formula"]], entry.get("printed")
    ours = formula(Case(entry, part, geometry))
    whole = entry["formula"] in REAL and "layers" in geometry
    return {
        "source": entry["source"],
        "where": entry["where"],
        "topic": entry["topic"],
        "what": entry["what"],
        "unit": entry["unit"],
        "printed": value,
        "ours": ours,
        "counted": formula(Case(entry, part, geometry, real=True)) if whole else None,
        "quotient": value / ours if value is not None else None,
        "verdict": verdict(entry.get("kind", "value"), value, ours),
        "says": entry.get("says", ""),
        "note": entry.get("note", ""),
    }


def verdict(kind: str, printed: float | None, ours: float) -> str:
    """A printed figure against ours: equal (`value`), not above (`most`), not below (`least`), enough room (`fits`)."""
    if printed is None:
        return "nothing printed"
    apart = printed / ours
    if kind == "fits":
        return "fits" if ours <= printed else f"does not fit: {1 / apart:.2f} times the room"
    if kind == "value":
        return "agrees" if abs(apart - 1) <= AGREE else f"disagrees: {apart:.2g} times ours"
    reached = apart if kind == "most" else 1 / apart
    return (
        f"possible: {reached:.0%} of the limit"
        if reached <= 1 + AGREE
        else f"impossible: {reached:.2g} times the limit"
    )
