"""The ceilings that a study itself measured for its main set-up."""

import pandas as pd

from plamo_study.analysis import stats
from plamo_study.analysis.ceilings import Place, Rate, every_kernel, limits as both_limits, main_place, measured, read
from plamo_study.analysis.roofline import Ceilings, Model


def ceilings(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per ceiling, kernel, device and threads: `best` sample and `usual` (median of processes), B/s or FLOP/s.

    For the study's main machine, kernels at their full number of columns.
    """
    table, entries = measured([rows]), []
    here = table[table["machine"] == main_place(rows).machine]
    for (layers, threads), group in here.groupby(["n_gpu_layers", "n_threads"]):
        place = Place(str(group["machine"].iloc[0]), int(threads), int(layers))
        rates: dict[str, Rate] = {"read": read([table], place)} if (group["ceiling"] == "read").any() else {}
        kernels = every_kernel([table], place)
        for name, rate in [*rates.items(), *((kernel.name, rate) for kernel, rate in kernels.items())]:
            entry = {"ceiling": "read" if name == "read" else "matmul", "kernel": name, "n_gpu_layers": layers}
            entry |= {"n_threads": threads, "best": rate.best, "usual": stats.median(rate.by_process)}
            entries.append(entry)
    return pd.DataFrame(entries)


def limits(rows: pd.DataFrame, what: Model | str) -> Ceilings:
    """The best ceilings of a study's main set-up, for a file or a tensor type: the input of the roofline."""
    return both_limits([measured([rows])], main_place(rows), what)[0]


def usual_limits(rows: pd.DataFrame, what: Model | str) -> Ceilings:
    """The usual values of the same ceilings: medians over processes."""
    return both_limits([measured([rows])], main_place(rows), what)[1]
