"""Is another backend right? Gates, the three tests, the batching law, a lost rotation and planted inputs, side by side.

What is asked here follows from the casts read in the engine's source, and from the law that holds on the CPU. Each
backend is shown by the machine that ran it last.
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd
from IPython.display import Markdown

from plamo_study.measure.cells import ROTATION
from plamo_study.measure.recording import elsewhere, read
from plamo_study.models import casts
from plamo_study.present import evidence
from plamo_study.present.tables import Columns, Table, table
from plamo_study.studies.batching_law import analysis as law
from plamo_study.studies.numeric_range import analysis

STUDY, SCALE = "04-backends", "mini"
COMMANDS = "plamo-study measure 04-backends --beside blas, and the same with --engine vulkan"
VULKAN = "Vulkan"
NAMES = {"stock": "CPU", "blas": "OpenBLAS"}  # builds that compute on the CPU
Facts = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Backend:
    """One backend's rows, the facts they refer to, and the machine."""

    name: str
    rows: pd.DataFrame
    facts: Facts
    machine: str


def recorded() -> list[Backend]:
    """Every backend that was run, the CPU first; of each the rows of one machine."""
    newest = read(STUDY, "recorded", SCALE)
    recordings = [newest, *elsewhere(newest)] if newest else []
    found: dict[str, Backend] = {}
    for recording in sorted(recordings, key=lambda each: str(each.rows["started"].max()), reverse=True):
        rows = recording.rows
        (machine,) = (recording.facts[name] for name in rows["machine"].unique())
        for (build, layers), own in rows[rows["build"] != ""].groupby(["build", "n_gpu_layers"], sort=False):
            on_cpu = NAMES.get(str(build), str(build))
            name = casts.of_device(machine["gpus"][0]) if layers else on_cpu
            found.setdefault(name, Backend(name, own, recording.facts, evidence.chip(machine)))
    return [found[name] for name in sorted(found, key=[*NAMES.values(), *casts.ON_GPUS, casts.TENSOR, *found].index)]


def of(name: str) -> Backend | None:
    """One backend by its name; None where it was not run."""
    return next((backend for backend in recorded() if backend.name == name), None)


def planted() -> Table | Markdown:
    """Per type and phase the smallest planted input with which each backend fails, and how it fails."""
    backends = recorded()
    if not backends:
        return Markdown(f"Nothing is recorded: `{COMMANDS}`.")
    found = {backend.name: analysis.planted(backend.rows, backend.facts) for backend in backends}
    failing = pd.concat([_failing(grid).rename(name) for name, grid in found.items()], axis=1)
    data = failing.fillna("not run").reset_index()
    columns: Columns = {"dtype": ("ssm_out", ""), "phase": ("phase", "")}
    columns = {**columns, **{name: (name, "") for name in found}}
    grids = pd.concat(found.values())
    machines = "; ".join(dict.fromkeys(f"{backend.name}: {backend.machine}" for backend in backends))
    note = f"{int(grids['agrees'].sum())} of {len(grids)} cases as foretold from the source. Recorded on {machines}."
    return table(data, columns, note)


def _failing(grid: pd.DataFrame) -> "pd.Series[str]":
    """From which input on a type fails in a phase, and how; in the table's order of types."""
    found = analysis.thresholds(grid)
    order = {name: place for place, name in enumerate(casts.known_types())}
    found = found.sort_values("dtype", key=lambda names: names.map(order), kind="stable").set_index(["dtype", "phase"])
    return pd.Series(
        [
            "never" if pd.isna(row.not_finite_from) else f"{row.how} from {row.not_finite_from:,.3g}"
            for row in found.itertuples()
        ],
        index=found.index,
    )  # fmt: skip


def verdicts() -> Table | Markdown:
    """A line a backend: is it right where it should be, and wrong where it was foretold to be."""
    backends = [backend for backend in recorded() if (backend.rows["workload"] == "gate").any()]
    if not backends:
        return Markdown(f"Nothing is recorded: `{COMMANDS}`.")
    columns: Columns = {
        "backend": ("backend", ""),
        "gates": ("embedded models against the oracle", ""),
        "hybrid": ("three tests, PLaMo 2", ""),
        "control": ("three tests, PLaMo 3", ""),
        "law": ("batches as the law says", ""),
        "rotation": ("file without rotation", ""),
        "planted": ("planted inputs as foretold", ""),
    }
    return table(pd.DataFrame([_verdict(backend) for backend in backends]), columns)


def _verdict(backend: Backend) -> dict[str, str]:
    rows, facts = backend.rows, backend.facts
    gates = rows[(rows["workload"] == "gate") & (rows["status"] == "ok")]
    worst = max(max(checks["prefill_error"], checks["decode_error"]) for checks in gates["checks"])
    grid = analysis.planted(rows, facts)
    replayed = law.checked(rows, facts)
    drawn = replayed[replayed["label"] == ""]
    tests = law.three_tests(rows)
    of_hybrid = tests["model"].map(lambda model: facts[model]["shape"]["arch"] == law.HYBRID)
    entry = {"backend": backend.name, "gates": f"{_of(gates['verdict'] == 'valid')} right, {worst:.2g} off at most"}
    entry |= {"hybrid": _tests(tests[of_hybrid]), "control": _tests(tests[~of_hybrid])}
    entry |= {"law": _of(drawn["exact"]), "rotation": _rotation(rows), "planted": _of(grid["agrees"].astype(bool))}
    return entry


def _tests(found: pd.DataFrame) -> str:
    failed = found[~(found["error"] <= found["limit"])]
    if failed.empty:
        return f"{len(found)} of {len(found)} hold"
    return f"{len(failed)} of {len(found)} fail, {failed['error'].min():.2g} off or more"


def _rotation(rows: pd.DataFrame) -> str:
    found = rows[rows["label"] == ROTATION]
    if found.empty:
        return "not run"
    row = found.iloc[-1]
    if row["status"] != "ok":
        return "never returns" if row["status"] == "hang" else str(row["status"])
    return f"answers, {row['checks']['error']:.2g} off (rounding {row['checks']['rounding']:.1g})"


def _of(holds: "pd.Series[bool]") -> str:
    return f"{int(holds.sum())} of {len(holds)}"


def on_half_precision() -> str:
    """What was run on the backend whose matrix kernels hold inputs in F16, in a paragraph; "" where it was not run."""
    vulkan = of(VULKAN)
    if vulkan is None:
        return ""
    found = analysis.thresholds(analysis.planted(vulkan.rows, vulkan.facts)).set_index(["phase", "dtype"])
    prompts, steps = found.loc["prompt"], found.loc["decode"]
    broken, kept = prompts[prompts["not_finite_from"].notna()], prompts[prompts["not_finite_from"].isna()]
    silent = int((broken["how"] == "wrong").sum())
    alone = int(steps["not_finite_from"].isna().sum())
    return (
        f"**Run on a backend that holds inputs in F16.** Vulkan's matrix kernels do, here on {vulkan.machine}. Prompts "
        f"go wrong there with {len(broken)} of {len(prompts)} types of `ssm_out`, from "
        f"{broken['not_finite_from'].min():,.0f} on; {' and '.join(kept.index)} never "
        f"{'does' if len(kept) == 1 else 'do'}. **With {silent} of them every logit stays finite, and no error is "
        f"raised.** Fed token by token, {alone} of {len(steps)} types are right at every planted size, "
        f"because up to eight columns take kernels that keep F32. So an input beyond F16 does to such a backend what "
        f"the report says of a Mac: prompts of several lines go wrong in Q8_0, and not in BF16."
    )
