"""Notebook 04 on the two speeds of one file: what the recorded processes say about where they come from."""

from collections.abc import Sequence

import altair as alt
import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis.usable import main_rows
from plamo_study.measure.recording import Recording, read
from plamo_study.present import evidence
from plamo_study.present.evidence import escaped
from plamo_study.present.figures import Chart
from plamo_study.present.tables import Columns, Table, folded, significant, table
from plamo_study.present.theme import CATEGORIES
from plamo_study.studies.quantization import analysis, memory_modes

READING_TOO = ("01-phase-asymmetry", "02-roofline", "03-batch-scaling")  # studies that read plain memory
TRIED_AT = "shape"
GB = 1e-9
CAUSE = (
    "What differs lies outside this machine's view. The explanation left is memory that its host shares with others; "
    "that is not shown. Each ratio to this file mixes both speeds, so its interval is as wide as they are apart."
)
COLOURS = {memory_modes.DECODE: CATEGORIES[1], memory_modes.PRODUCT: CATEGORIES[0], memory_modes.READING: CATEGORIES[2]}


def rates(recording: Recording) -> pd.DataFrame:
    """Every process that waits for memory, of this study and of those that read plain memory on the same machine."""
    machine = recording.rows["machine"].iloc[0]
    others = (read(name, recording.source, recording.scale) for name in READING_TOO)
    same = [r for r in others if r is not None and r.rows["machine"].iloc[0] == machine]
    return pd.concat([_rates(r) for r in (recording, *same)], ignore_index=True)


def _rates(recording: Recording) -> pd.DataFrame:
    own = recording.rows["workload"].isin(["read"]) | recording.study.startswith("04")
    return memory_modes.rates(recording.rows[own], analysis.files(recording.rows, recording.facts))


def finding(recording: Recording) -> Markdown:
    """Whether the reference came at two speeds here, what else did on this machine, and what that leaves as a cause."""
    return Markdown(said(rates(recording)))


def said(found: pd.DataFrame) -> str:
    """The same of a table of rates."""
    cells = memory_modes.spreads(found)
    of_file = cells[(cells["what"] == memory_modes.DECODE) & (cells["dtype"] == analysis.REFERENCE)]
    if of_file.empty:
        return f"No {analysis.REFERENCE} file was computed right."
    two = of_file[of_file["modes"]]
    if two.empty:
        return (
            f"**The {analysis.REFERENCE} file comes at one speed here**: {_listed(of_file)}. Two modes would be a "
            f"gap of more than {memory_modes.APART:g} times, at least {memory_modes.LEAST} processes on either side."
        )
    reading = cells[cells["what"] == memory_modes.READING]
    parts = [f"**One {analysis.REFERENCE} file decodes at two speeds**: {_listed(two)}."]
    if not reading.empty and reading["modes"].any():
        parts.append(
            f"**Memory alone shows two speeds too**: a process that only reads its own memory, with no model and no "
            f"engine, gets {_listed(reading)}. Inside one process the rate changed by up to "
            f"{reading['inside'].max():.2f} times over the same pages, so their place is not the whole cause."
        )
    parts += [_compute(found, two), _unaffected(cells), CAUSE]
    return parts[0] + "\n\n" + "\n".join(f"- {part}" for part in parts[1:] if part)


def experiment() -> Markdown:
    """What flips the file's speed where it was tried: pages kept, dropped before, and what else is recorded."""
    tried = read("04-modes", "recorded", TRIED_AT)
    if tried is None:
        return Markdown("The experiment is not recorded here: `plamo-study measure 04-modes --scale shape`.")
    return Markdown(tried_said(_rates(tried), memory_modes.readings(main_rows(tried.rows)), evidence.chips(tried)))


def tried_said(found: pd.DataFrame, readings: pd.Series, chip: str) -> str:
    """The experiment's finding from its rates and the readings beside them."""
    cells = memory_modes.spreads(found)
    lines = [
        f"- {_kind(line)}: {significant(3, GB)(line['median'])} GB/s in {line['n']} processes, "
        f"{line['slowest'] * GB:.1f} to {line['fastest'] * GB:.1f}, widest gap {line['gap']:.2f} times"
        for line in cells.to_dict("records")
    ]
    known = readings.dropna() * GB
    beside = f"Plain memory beside them gave {known.min():.1f} to {known.max():.1f} GB/s. " if len(known) else ""
    two = int(cells["modes"].sum())
    answer = (
        f"{two} of {len(cells)} arrangements come at two speeds"
        if two
        else f"none of {len(cells)} arrangements comes at two speeds. Nothing tried flips a process from one to the "
        "other"
    )
    return f"**Tried on {chip}: {answer}.** {beside}\n\n" + "\n".join(lines)


def controlled(recording: Recording) -> Table | Markdown:
    """Decode and prefill over the reference as recorded, and measured again where memory is read beside every step."""
    again = read("04-controlled", "recorded", TRIED_AT)
    if again is None:
        return Markdown("Not measured again here: `plamo-study measure 04-controlled --scale shape`.")
    return compared(recording, again)


def compared(recording: Recording, again: Recording) -> Table:
    """The ratios of two recordings beside one another, each under the name of its machine."""
    wide: list[pd.DataFrame] = []
    for one in (recording, again):
        data = analysis.speeds(one.rows).pivot(index=["model", "dtype"], columns="phase", values="ratio")
        wide.append(data.rename(columns={phase: f"{phase} {len(wide)}" for phase in data.columns}))
    data = wide[1].join(wide[0], how="left").reset_index()
    data = data[data["dtype"] != analysis.REFERENCE]
    chips = [evidence.chips(one) for one in (recording, again)]
    columns: Columns = {"model": ("model", ""), "dtype": ("type", "")}
    for phase in ("decode", "prefill"):
        columns = {**columns, **{f"{phase} {i}": (f"{phase} over F16, {chips[i]}", ".2f") for i in (0, 1)}}
    rank, p, read_range, step_range = memory_modes.explained(again.rows)
    note = (
        f"On {chips[1]}, plain memory was read right after each process's steps, to leave out processes whose memory "
        f"was slow. That was dropped after measuring: readings differ {read_range:.1f} times, steps of one type "
        f"{step_range:.2f} times, and a slow reading says little about a slow step (rank correlation {rank:.2f}, "
        f"p = {p:.3f})."
    )
    return table(data.astype(object).where(data.notna(), None), columns, note)


def _listed(cells: pd.DataFrame) -> str:
    """Cells with their range and widest gap."""
    words = []
    for line in cells.to_dict("records"):
        name = f"{escaped(line['model'])} " if line["model"] else ""
        where = "" if line["what"] != memory_modes.DECODE else "" if line["mapped"] else "in own memory "
        where += "pages dropped before " if line["cold"] else ""
        words.append(
            f"{name}{where}{line['slowest'] * GB:.1f} to {line['fastest'] * GB:.1f} GB/s in {line['n']} processes, "
            f"widest gap {line['gap']:.2f} times"
        )
    return "; ".join(words)


def _compute(found: pd.DataFrame, two: pd.DataFrame) -> str:
    """Whether the same processes computed their prompts at two speeds too."""
    mine = found[(found["what"] == memory_modes.DECODE) & (found["dtype"] == analysis.REFERENCE)]
    ratios = []
    for model in two["model"]:
        group = mine[mine["model"] == model]
        fast = group["rate"] > group["rate"].median() * (1 if len(group) % 2 == 0 else 0.999)
        slow = group[~fast]["prefill"].median()
        ratios.append(float(slow / group[fast]["prefill"].median()))
    known = [f"{r:.2f}" for r in ratios if r == r]
    if not known:
        return ""
    return (
        f"The prompt waits for compute and not for memory: in the slower half of these processes it took "
        f"{' and '.join(known)} times as long as in the faster half."
    )


def _unaffected(cells: pd.DataFrame) -> str:
    """How little the types vary that draw less than what the slower speed gives."""
    decode = cells[cells["what"] == memory_modes.DECODE]
    slow = decode[decode["modes"]]["slowest"].min()
    below = decode[decode["fastest"] < slow]
    if below.empty:
        return ""
    return (
        f"The {len(below)} files that never draw {slow * GB:.0f} GB/s vary by {below['spread'].max():.2f} times at "
        "most between processes."
    )


def cells(recording: Recording) -> Markdown:
    """Folded, per cell: slowest and fastest process, widest gap between neighbours, and what changed inside one."""
    data = memory_modes.spreads(rates(recording))
    data = data.assign(order=[e.value for e in data["median"]]).sort_values("order", ascending=False)
    data["kind"] = [_kind(line) for line in data.to_dict("records")]
    columns: Columns = {
        "kind": ("what reads", ""),
        "dtype": ("type", ""),
        "n": ("processes", ""),
        "slowest": ("slowest (GB/s)", significant(3, GB)),
        "fastest": ("fastest (GB/s)", significant(3, GB)),
        "gap": ("widest gap", ".2f"),
        "inside": ("change inside a process", ".2f"),
    }
    return folded(
        "Every cell that waits for memory: slowest and fastest process, and what changed inside one",
        table(data, columns),
    )


def _kind(line: dict[str, object]) -> str:
    if line["what"] != memory_modes.DECODE:
        return f"{line['what']}, own memory"
    how = "pages dropped before" if line["cold"] else "mapped file" if line["mapped"] else "own memory"
    return f"{line['what']}, {line['model']}, {how}"


def _short(line: dict[str, object]) -> str:
    """What the figure calls a cell, whose colour says what reads: a decode by its model, everything else by name."""
    if line["what"] == memory_modes.READING:
        return "plain memory"
    if line["what"] != memory_modes.DECODE:
        return f"{line['what']}, {line['dtype']}"
    unusual = ", pages dropped" if line["cold"] else "" if line["mapped"] else ", own memory"
    return f"{line['model']}{unusual}, {line['dtype']}"


def figure(recording: Recording, title: str = "How fast each process read weights") -> Chart:
    """A dot a process, a line a cell, for what draws most; colours say what reads."""
    return dots(rates(recording), title)


def dots(found: pd.DataFrame, title: str, most: int = 14) -> Chart:
    """The `most` cells that draw most, fastest first."""
    tidy = found.assign(cell=[_short(line) for line in found.to_dict("records")], gb=found["rate"] * GB)
    order = tidy.groupby("cell")["gb"].max().sort_values(ascending=False).index[:most].tolist()
    tidy = tidy[tidy["cell"].isin(order)]
    colour = alt.Color("what:N", title=None, scale=alt.Scale(domain=list(COLOURS), range=list(COLOURS.values())))
    chart = alt.Chart(tidy[["cell", "gb", "what"]]).mark_point(size=70, filled=True, opacity=0.7)
    chart = chart.encode(
        x=alt.X("gb:Q", title="Weights or memory read (GB/s)", scale=alt.Scale(zero=False)),
        y=alt.Y("cell:N", title=None, sort=order, axis=alt.Axis(labelLimit=320)),
        color=colour,
    )
    words = "; ".join(f"{cell}: {_range(tidy[tidy['cell'] == cell]['gb'])}" for cell in order)
    return chart.properties(title=title, description=f"{title}. GB/s, slowest to fastest. {words}.", width=420)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}"
