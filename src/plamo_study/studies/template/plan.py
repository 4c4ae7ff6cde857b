"""Which cells the study of half a prompt measures at which scale."""

from dataclasses import replace

from llama_meter.cells import Cell, Prefill
from llama_meter.measure.plan import Plan, change, check_scale, files_of, on_file, scale_of, with_gates
from llama_meter.measure.request import NOTHING, Sweep

WHOLE = 64  # tokens of the longer prompt


def halves(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Prefill of a prompt and of half of it, for every file; gates and anchor come with them."""
    check_scale(scale)
    base = change(Prefill(scale=scale, n_gpu_layers=-1 if gpu else 0), **sweep.settings())
    files, lengths = files_of(scale, sweep), sweep.n_prompt or (WHOLE, WHOLE // 2)
    cells: list[Cell] = [on_file(change(base, n_prompt=n), file) for file in files for n in lengths]
    planned = with_gates("99-half-a-prompt", scale_of(scale, sweep), tuple(cells), exact_cache=False)
    return replace(planned, needed=len(cells))
