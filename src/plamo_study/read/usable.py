"""Rows whose times count as speeds: correct computations that nothing else on the machine disturbed."""

import pandas as pd

from llama_meter.cells import ORDER
from llama_meter.limits import DRIFT_LIMIT, LEAST_BLOCKS, RIGHT

CELL = ["machine", "build", "engine", *ORDER]
STOCK = "stock"  # the build that corrects nothing
NOISY = 0.10  # coefficient of variation between processes that marks a cell noisy


def usable(rows: pd.DataFrame) -> pd.DataFrame:
    """Valid, undisturbed rows, without anchors and gates.

    Where fewer than two blocks of a cell remain, all its blocks are used: an honest wide interval beats no number, and
    `evidence.disturbed` reports it before the finding. A repeated row replaces the original.
    """
    return undisturbed(rows[~rows["anchor"] & rows["verdict"].isin([*RIGHT, "n/a"])])


def undisturbed(rows: pd.DataFrame) -> pd.DataFrame:
    """Undisturbed rows; for a cell with fewer than two undisturbed blocks, one row of each of its blocks."""
    steady = ~marked(rows)
    if steady.all():
        return rows[steady]
    cells = _cells(rows)
    lacking = rows["block"].where(steady).groupby(cells).transform("nunique") < LEAST_BLOCKS
    better = steady.groupby([cells, rows["block"]]).transform("any")
    last = ~pd.DataFrame({"cell": cells, "block": rows["block"]}).duplicated(keep="last")
    return rows[steady | (lacking & ~better & last)]


def unrepeated(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows without those that another of the same cell and block, measured again, replaces: pairs are of two."""
    places = pd.DataFrame({"cell": _cells(rows), "block": rows["block"]}, rows.index)
    return rows[~places.duplicated(keep="last")]


def marked(rows: pd.DataFrame) -> pd.Series:
    """Whether each row was disturbed, or its block drifted."""
    return rows.get("disturbed", False) | (rows["drift"] > DRIFT_LIMIT)


def marked_by(rows: pd.DataFrame) -> pd.Series:
    """What marks each row: the frame's `disturbed_by` where it is not empty, else "drift" or ""."""
    drift = (rows["drift"] > DRIFT_LIMIT).map({True: "drift", False: ""})
    return rows["disturbed_by"].mask(rows["disturbed_by"] == "", drift) if "disturbed_by" in rows else drift


def disturbed_cells(rows: pd.DataFrame) -> tuple[int, int]:
    """(cells whose numbers come from disturbed rows for lack of others, number of all cells)."""
    used = usable(rows[rows["block"] >= 0])
    cells = _cells(used)
    return cells[marked(used)].nunique(), cells.nunique()


def _cells(rows: pd.DataFrame) -> pd.Series:
    """A number for each row, the same for rows of one cell, build and machine."""
    return rows.groupby([name for name in CELL if name in rows], dropna=False, sort=False).ngroup()


def main_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Usable rows of the machine's main set-up: offloaded where possible, with all threads."""
    device_rows = on_main_device(usable(rows))
    return device_rows[device_rows["n_threads"] == device_rows["n_threads"].max()]


def on_main_device(rows: pd.DataFrame) -> pd.DataFrame:
    """The GPU's rows where layers were offloaded, else the CPU's: all rows."""
    offloaded = rows["n_gpu_layers"] != 0
    return rows[offloaded == offloaded.any()]


def main_build(rows: pd.DataFrame) -> str:
    """The engine as released, or where it ran nothing the build with most rows."""
    builds = rows.loc[rows["model"] != "", "build"]
    return STOCK if (builds == STOCK).any() or builds.empty else str(builds.mode().iloc[0])


def model_names(rows: pd.DataFrame) -> list[str]:
    """The models of a frame, in alphabetical order."""
    return sorted(name for name in rows["model"].unique() if name)
