"""The figures of the upstream reports in data/upstream, each written from recorded rows or a recorded run."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from llama_meter.cells import ROTATION
from llama_meter.measure import files
from llama_meter.measure.plan import MODELS
from llama_meter.serve.concurrency import Served
from llama_meter.serve.objectives import SLOTS
from plamo_study.arithmetic import kernels
from plamo_study.laws import (
    backends,
    batching_tests as law_check,
    builds,
    drafting as speculation,
    serving,
)
from plamo_study.laws.gpu import SCAN
from plamo_study.measurements import measured_added, measurements
from plamo_study.plans.batching_law import TESTS
from plamo_study.plans.history import N_PROMPT
from plamo_study.read.recording import Recording
from plamo_study.read.results import CROWDED, HELD_AT, HELD_UP, Crowds
from plamo_study.read.usable import STOCK
from plamo_study.show import collected
from plamo_study.show.evidence import chip, chips, escaped
from plamo_study.show.tables import Columns, Table, scaled, significant, table
from plamo_study.stats import estimates
from plamo_study.stats.estimates import compare, estimate

BUILDS = {"stock": "as released", builds.CORRECT: "corrected"}
TILES = "partial-tiles"
SOME_SIZES = (1, 8, 16, 32, 48, 63, 64, 65, 96, 128)  # of the chunks of one layer, where every size was measured
COLUMNS = {0: "512 columns (a prompt)", 1: "1 column (a decode step)"}


def three_tests(recording: Recording) -> Table:
    """Largest relative error of the logits asked about: PLaMo 2 before and after, PLaMo 3 as control."""
    data = law_check.three_tests(recording.rows)
    data = data[data["build"].isin(BUILDS)]
    data["who"] = [f"{model}, {BUILDS[build]}" for model, build in zip(data["model"], data["build"], strict=True)]
    shown = data.pivot_table(index="test", columns="who", values="error", aggfunc="max").reindex(list(TESTS))
    shown = shown[sorted(shown.columns, key=lambda who: (who.split(",")[0], "corrected" in who))]
    shown.insert(0, "it asks that", [TESTS[test] for test in shown.index])
    return Table(shown.reset_index().map(lambda value: value if isinstance(value, str) else f"{value:.1e}"))


def law(recording: Recording) -> str:
    """The outcomes of PLaMo 2's batches, those drawn at random apart from the fixed map; a clause per build."""
    data = law_check.checked(recording.rows, recording.facts)
    hybrid = law_check.of_hybrid(data, recording.facts)
    lines = []
    for label, kind in BATCHES.items():
        said = []
        for build, words in BUILDS.items():
            counts = hybrid[(hybrid["build"] == build) & (hybrid["label"] == label)]["observed"].value_counts()
            parts = [f"{counts.get(what, 0)} {name}" for what, name in OUTCOMES.items()]
            said.append(f"{words}: {', '.join(parts)} of {counts.sum()}")
        lines.append(f"{kind}, {'; '.join(said)}.")
    return "\n\n".join(lines)


OUTCOMES = {"right": "right", "wrong": "silently wrong", "abort": "aborted"}
BATCHES = {
    "": "Batches drawn at random (unequal prompts, slots joining and leaving, partial steps)",
    "map": "Batches of a fixed map (1 to 12 equal prompts packed into calls, at four sizes of a call)",
}


def first_aborts(recording: Recording) -> str:
    """The smallest number of packed prompts that aborts, by batch size, in one sentence."""
    data = law_check.first_aborts(law_check.checked(recording.rows, recording.facts))
    stock = data[data["build"] == "stock"].set_index("n_batch")["observed"]
    found = [f"{n:.0f} prompts at `n_batch` {size}" for size, n in stock.items() if n == n and n is not None]
    later = data[data["build"] == builds.CORRECT]["observed"].notna().sum()
    return (
        f"Prompts of 128 tokens in one call, `n_seq_max` being their number: the first abort comes with "
        f"{', '.join(found)}. The corrected build aborts at {later or 'none'} of these sizes."
    )


def server_finding(runs: list[Served]) -> str:
    """The effect of concurrent requests on a server as released: a sentence for each failed run, then the table."""
    said = []
    for run in runs:
        if run.build == "stock" and (run.changed or run.exit is not None):
            answers = f"{run.changed} of {run.answers} answers are not those of the same prompt alone"
            end = f", and the process ends in round {run.rounds_done + 1}: `{run.said}`" if run.exit is not None else ""
            said.append(f"- {run.at_once} requests at once: {answers}{end}.")
    return "\n".join(said) + f"\n\n{server(runs)._repr_markdown_()}"


def server(runs: list[Served]) -> Table:
    """Results of a stock and a corrected llama-server under concurrent requests."""
    if not runs:
        return Table(pd.DataFrame([{"recorded": "nothing yet: plamo-study engine server BINARY --reference"}]))
    entries = []
    for run in runs:
        end = "lives" if run.exit is None else f"dead in round {run.rounds_done + 1} of {run.rounds}"
        entry = {"build": BUILDS.get(run.build, run.build), "model": run.model, "slots": run.slots}
        entry |= {"requests at once": run.at_once, "answers that changed": f"{run.changed} of {run.answers}"}
        entries.append(entry | {"and at near-ties": f"{run.near_ties}", "server": end})
    return Table(pd.DataFrame(entries))


def under_load(asked: pd.DataFrame) -> str:
    """The outcome of streamed requests to llama-server, as released and corrected, in a sentence.

    `asked`: a frame of `measurements.answers`.
    """
    asked = asked[(asked["server"] == "llama-server") & (asked["n_clients"] > 1)]
    users, slots = asked["n_clients"], " or ".join(str(n) for n in sorted(set(asked["n_seq"])))
    said = []
    for r in serving.under_load(asked).sort_values(["model", "build"], ascending=[True, False]).itertuples():
        how = f" ({r.how})" if r.died else ""
        said.append(
            f"{r.model}, {BUILDS.get(r.build, r.build)}: {r.prompts_changed} of {r.prompts} prompts get an answer that "
            f"is not theirs alone, {r.changed} of {r.answers} answers ({r.near_ties} more at near-ties), and {r.died} "
            f"of {r.servers} servers died{how}"
        )
    load = f"{users.min()} to {users.max()} at once, {slots} slots"
    return f"Streamed, {load} (`plamo-study run 11`): {'; '.join(said)}."


def shared_calls(known: collected.Known) -> str:
    """What notebook 03b found of prompts that share a call in the engine itself."""
    lines = [line for line in known["03b-batching-law"]["findings"] if "prompts a call" in line]
    how = "In the engine itself (`plamo-study measure 03-answers --beside corrected`):\n"
    return "\n".join([how, *(f"- {line}" for line in lines)])


def crowds(found: Crowds | None) -> Table:
    """Time per token by the server's own count, with few and with many requests waiting, on both servers."""
    if not found:
        return Table(pd.DataFrame([{"not compared here": f"plamo-study server build --patched, {CROWDED}"}]))
    time = significant(3, 1e3)
    columns: Columns = {
        "n_clients": ("requests at a time", ""), "waits": ("waiting", ""),
        "released": ("as released (ms)", time), "patched": ("patched (ms)", time),
        "ratio": ("released / patched", ".2f"), "rate": ("tokens/s, released", significant(3)),
        "rate_patched": ("patched", significant(3)), "rates": ("patched / released", ".2f"),
    }  # fmt: skip
    rounds = len({each.round for each in found.loads})
    note = (
        f"{escaped(found.model)}, {rounds} servers of each kind, in turn; a further token by the server's own count. "
        f"Recorded on {chip(found.machine)}."
    )
    beside = {"ratio": ("released", "patched"), "rates": ("rate_patched", "rate")}
    return table(serving.crowds(found), columns, note, beside)


def side_by_side(held: pd.DataFrame) -> Table:
    """Ranges for the released and the patched server, stopped equally long; `held`: a frame of `serving.alike`."""
    entries = []
    for name in dict.fromkeys(held["server"]):
        of = held[held["server"] == name]
        before, after = of[of["minute"] == HELD_AT], of[of["minute"] > HELD_AT]
        stop, last = of[of["minute"] == HELD_AT + 1], of[of["minute"] == of["n_minutes"]]
        runs = of.groupby("run")
        gone = [_gone(run) for _, run in runs]
        entry = {"llama-server": name, "requests/s": f"{of['rate'].iloc[0]:.1f}"}
        entry |= {
            "stopped for (s)": f"{of['held_s'].iloc[0]:.0f}",
            "answers in the minute before": _range(before["answered"]),
            "in the minute of the stop": f"{_range(stop['answered'])}, {_range(stop['failed'])} failed",
            f"in minute {after['minute'].nunique()} from the stop on": _range(last["answered"]),
            "not ended, at most, at a minute's end": _range(runs["waiting"].max()),
            "queue gone by minute": _range(gone)
            if all(gone)
            else "not in every run"
            if any(gone)
            else f"not in {after['minute'].nunique()}",
            "failed, of sent": f"{_range(runs['lost'].first())} of {_range(runs['sent'].first())}",
        }
        entries.append(entry | ({"runs": f"{len(runs)}"} if held["run"].max() > 1 else {}))
    return Table(pd.DataFrame(entries or [{"not tried here": HELD_UP}]))


def _range(numbers: Iterable[Any]) -> str:
    of = [int(each) for each in numbers]
    least, most = min(of), max(of)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _gone(run: pd.DataFrame) -> int | None:
    """Minute after the stop by which the queue was gone for good; None if it never was."""
    usual = run.loc[run["minute"] <= HELD_AT, "waiting"].max()
    calm = (run.loc[run["minute"] > HELD_AT, "waiting"] <= max(usual, SLOTS)).tolist()
    return next((n + 1 for n, _ in enumerate(calm) if all(calm[n:])), None)


def projections(recording: Recording) -> Table:
    """Step time with split projections over step time without, paired by block; above 1, the correction is faster."""
    curves = builds.curves(recording.rows)
    hybrid = next(model for _, model in curves if model.startswith(builds.HYBRID))
    before, after = curves[builds.CORRECT, hybrid], curves[builds.FLAT, hybrid]
    entries = []
    for n in before.index.intersection(after.index):
        both = pd.concat([before.loc[n], after.loc[n]], axis=1, keys=["split", "one"]).dropna()
        won = f"{(both['split'] > both['one']).sum()} of {len(both)}"
        entry = {"n_seq": n, "ratio": estimates.paired_ratio(both["split"], both["one"]), "won": won}
        entries.append(entry | both.median().to_dict())
    columns: Columns = {
        "n_seq": ("sequences", ""),
        "split": ("step, split (ms)", scaled(1e3, ".1f")),
        "one": ("step, one product (ms)", scaled(1e3, ".1f")),
        "ratio": ("times as fast", ".2f"),
        "won": ("faster in blocks", ""),
    }
    return table(pd.DataFrame(entries), columns, ratios={"ratio": ("split", "one")})


def packing(recording: Recording) -> Table:
    """Matrix products of packed and of plain weights on the recorded CPU: rates, and their ratio paired by block."""
    rows = recording.rows
    engine = recording.facts[rows["engine"].iloc[0]]
    rows = rows[(rows["workload"] == "matmul") & (rows["status"] == "ok")]
    rows = rows.assign(seconds=[1e-9 * _median(samples) for samples in rows["samples_ns"]])
    entries = []
    for dtype in sorted(set(rows[rows["label"] == "plain"]["dtype"])):
        for n, words in COLUMNS.items():
            found = rows[(rows["dtype"] == dtype) & (rows["n_prompt"] == n)]
            seconds = found.pivot_table(index="block", columns="label", values="seconds").dropna()
            work, unit = (int(found["n_bytes"].iloc[0]), "GB/s") if n else (int(found["n_flops"].iloc[0]), "GFLOP/s")
            rates = (work / seconds.median() / 1e9).to_dict()
            said = {f"{label}_said": f"{rate:.1f} {unit}" for label, rate in rates.items()}
            said["plain_said"] += f" ({kernels.by_type(engine, dtype, packed=False).split('; ')[n]})"
            entry = {
                "dtype": dtype,
                "with": words,
                "ratio": estimates.paired_ratio(seconds["plain"], seconds["packed"]),
            }
            entries.append(entry | rates | said)
    columns: Columns = {
        "dtype": ("type", ""),
        "with": ("product with", ""),
        "plain_said": ("plain", ""),
        "packed_said": ("packed", ""),
        "ratio": ("packed, times as fast", ".2f"),
    }
    return table(pd.DataFrame(entries), columns, ratios={"ratio": ("packed", "plain")})


def chunks(recording: Recording) -> Table:
    """Time of a chunk by its size: the engine as released, without flash attention, and every other build."""
    data = builds.by_size(recording.rows)
    wide = data.pivot(index=["model", "n_chunk"], columns="how", values=["call", "ratio"])
    shown = wide.index.to_frame(index=False)
    shown["call"] = wide["call", STOCK].to_numpy()
    columns: Columns = {"model": ("model", ""), "n_chunk": ("chunk", ""), "call": ("stock (ms)", scaled(1e3, ".1f"))}
    beside = {}
    for how in data["how"].unique():
        if how != STOCK:
            beside[f"{how} ratio"] = ("call", how)
            shown[how], shown[f"{how} ratio"] = wide["call", how].to_numpy(), wide["ratio", how].to_numpy()
            columns = {**columns, how: (f"{how} (ms)", scaled(1e3, ".1f"))}
            columns = {**columns, f"{how} ratio": (f"{how}, times as fast", ".2f")}
    return table(shown, columns, f"Recorded on {chips(recording)}.", beside)


def full_width() -> str:
    """Time of a chunk by its size in one layer of full width, as released and with the patch; then all together."""
    known = measurements("06-every-chunk").query("usable and metric == 'chunk'")
    of, to = "build == 'stock'", f"build == '{TILES}'"
    found = compare(known[known["n_chunk"].isin(SOME_SIZES)], of, to, by="model n_chunk")
    columns: Columns = {
        "n_chunk": ("chunk", ""),
        "first": ("stock (ms)", scaled(1e3, ".1f")),
        "second": (f"{TILES} (ms)", scaled(1e3, ".1f")),
        "estimate": ("patched, times as fast", ".2f"),
    }
    said = []
    for least, most in ((32, 63), (64, 128)):
        band = known[known["n_chunk"].between(least, most)]
        band = band.assign(value=band["value"] / band.groupby("n_chunk")["value"].transform("median"))
        each = band.groupby(["build", "machine", "block"], as_index=False)["value"].median()
        said.append(f"of {least} to {most} tokens {compare(each, of, to)['estimate'].iloc[0]:.2f} times as fast")
    shown = table(found, columns, ratios={"estimate": ("first", "second")})._repr_markdown_()
    return f"{shown}\n\nAll sizes together, with the patch: chunks {', '.join(said)}."


def rolled_back(recording: Recording) -> str:
    """The number of drafts that the state-keeping build rolled back, and the largest error left in the logits."""
    found = speculation.processes(recording.rows)
    found = found[(found["how"] == speculation.NATIVE) & (found["build"] != "stock") & (found["verdict"] == "valid")]
    rounds, error = 0, 0.0
    for process in found.itertuples():
        rounds += sum(n < process.n_draft for n in process.series["accepted"])
        error = max(error, process.checks["second_path_error"])
    return (
        f"With the embedded model {rounds:,} drafts were taken back in {len(found)} processes, of "
        f"{', '.join(map(str, sorted(set(found['n_seq']))))} sequences. "
        f"After each the logits were held against the same tokens decoded one by one: the largest relative error is "
        f"{error:.1e}, which is rounding."
    )


def kept_rates(recording: Recording) -> Table:
    """Tokens per second of the released engine and of the state-keeping build, at the same forced acceptance rates."""
    found = speculation.measures(recording.rows).query("usable and metric == 'rate' and label == ''")
    found = found[found["how"].isin((speculation.NATIVE, speculation.PART))]
    names = ["model", "n_prompt", "n_seq", "n_draft", "accepts"]
    columns: Columns = {
        "model": ("model", ""),
        "n_prompt": ("depth", ""),
        "n_draft": ("drafted", ""),
        "accepts": ("acceptance", ""),
        "second": ("as released (tokens/s)", significant(3)),
        "first": ("keeping states (tokens/s)", significant(3)),
        "estimate": ("times as many", ".2f"),
    }
    both = compare(found, of="build == 'rollback'", to="build == 'stock'", by=names)
    note = f"Measured on {chips(recording)}."
    return table(both.sort_values(list(columns)[:4]), columns, note, {"estimate": ("first", "second")})


def kept_states(model: str, drafts: tuple[int, ...]) -> str:
    """Recurrent state of a sequence in MiB, as released and with room to roll back a number of tokens."""
    shape = files.planned_fact(model, "shape", "Q8_0")["shape"]
    inner = shape["mamba_heads"] * shape["mamba_head_dim"]
    layers = len(range(0, shape["layers"], 2))  # every second layer
    one = 4 * layers * inner * (shape["d_state"] + shape["d_conv"] - 1) / 2**20
    said = ", ".join(f"{one * (k + 1):.1f} MiB with `n_rs_seq` = {k}" for k in drafts)
    return f"A sequence of {model} keeps {one:.1f} MiB of recurrent state; {said}. Nothing else grows."


def scales() -> Table:
    """Steps by kind of values, with scales looked up in the table or converted, and the ratio of the two builds."""
    known = measurements("05-copies").query("usable")
    steps, prompts = known[known.metric == "step"], known[known.metric == "prompt"]
    took = estimate(steps, by="build model", times=1e3).set_index(["build", "model"]).estimate
    usual, entries = f"{MODELS[0]}*", []
    for name in steps.model.unique():
        entry: dict[str, Any] = {
            "model": name,
            "up": took["stock", name],
            "converted": took.get(("half-conversion", name)),
        }
        found = compare(
            steps, of=f"model == '{name}' and build == 'stock'", to=f"model == '{usual}' and build == 'stock'"
        )
        own = compare(steps[steps.model == name], of="build == 'half-conversion'", to="build == 'stock'").estimate
        read = compare(prompts[prompts.model == name], of="build == 'half-conversion'", to="build == 'stock'").estimate
        entry |= {"longer": found.estimate[0], "ratio": own[0] if len(own) else None}
        entries.append(entry | {"prompt": read[0] if len(read) else None})
    columns: Columns = {
        "model": ("file", ""),
        "up": ("step, looked up (ms)", ".1f"),
        "longer": ("times that of the usual file", ".2f"),
        "converted": ("step, converted (ms)", ".1f"),
        "ratio": ("converted over looked up", ".2f"),
        "prompt": ("the same of a prompt of 16", ".2f"),
    }
    return table(pd.DataFrame(entries), columns)


def tiled() -> Table:
    """Times of the newest release in Q4_K_M with its tiled kernels over those without, on all and on fewer vectors."""
    known = measurements("17-changes").query("usable and dtype == 'Q4_K_M' and metric in ('prefill', 'step')")
    both = {"AVX-512": ("stock", "untiled"), "AVX2": ("avx2", "avx2-untiled")}
    entries: list[dict[str, Any]] = []
    for vectors, (with_tiles, without) in both.items():
        ratios = compare(known, f"build == '{with_tiles}'", f"build == '{without}'", by="model metric n_seq")
        entries += [
            {"vectors": vectors, "model": line.model, "columns": line.n_seq if line.metric == "step" else N_PROMPT,
             "ratio": line.estimate, "n": line.n}
            for line in ratios.sort_values(["model", "metric", "n_seq"]).itertuples()
        ]  # fmt: skip
    columns: Columns = {
        "vectors": ("kernels for", ""), "model": ("file", ""), "columns": ("columns", ""),
        "ratio": ("time, tiled over untiled", ".2f"), "n": ("pairs", ""),
    }  # fmt: skip
    return table(pd.DataFrame(entries), columns)


def scan_on_gpu() -> Table:
    """Prompts and steps of PLaMo 2 with the scan on the CPU, as released, and on the GPU."""
    passes = {("01-phase-asymmetry", "prefill"): "n_prompt", ("03-batch-scaling", "step"): "n_seq"}
    entries = []
    for (study, metric), by in passes.items():
        found = measured_added(study).query(f"usable == True and metric == '{metric}' and n_gpu_layers != 0")
        found = found[found["model"].str.startswith(MODELS[0])]
        for line in compare(found, of="build == 'stock'", to=f"build == '{SCAN}'", by=by).itertuples():
            size = int(getattr(line, by))
            what = f"prompt of {size}" if metric == "prefill" else f"step of {size} sequence{'s' * (size > 1)}"
            entries.append({"pass": what, "first": line.first, "second": line.second, "ratio": line.estimate})
    ms = scaled(1e3, ".1f")
    columns: Columns = {"pass": ("pass", ""), "first": ("as released (ms)", ms), "second": (f"{SCAN} (ms)", ms)}
    return table(pd.DataFrame(entries), {**columns, "ratio": ("times as fast", ".1f")})


def lost_rotation() -> Table:
    """What each backend makes of a file whose head counts are an array that starts with 0, against the right file."""
    entries = []
    for backend in backends.recorded():
        for row in backend.rows[backend.rows["label"] == ROTATION].iloc[-1:].itertuples():
            said = "never returns" if row.status == "hang" else "answers"
            checks = {name: f"{row.checks[name]:.2f}" if row.checks else "n/a" for name in ("error", "rounding")}
            entries.append({"backend": backend.name, "machine": backend.machine, "the file without": said} | checks)
    headings = {"error": "logits off by", "rounding": "rounding of the right file"}
    return Table(pd.DataFrame(entries).rename(columns=headings))


def gpu() -> str:
    """The GPU of the machine that ran both."""
    return ", ".join(sorted(set(measured_added("01-phase-asymmetry").query("n_gpu_layers != 0")["device"])))


def machine(recording: Recording) -> str:
    """The processor and the instruction sets that the engine was built for, as the engine reports it."""
    facts = recording.facts
    chips = {chip(facts[i]) for i in recording.rows["machine"].unique()}
    builds = {facts[i]["build"] for i in recording.rows["engine"]}
    return f"{', '.join(sorted(chips))}; {', '.join(sorted(builds))}"


def _median(samples: list[list[int]]) -> float:
    return float(pd.Series([value for part in samples for value in part]).median())
