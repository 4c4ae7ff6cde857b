"""Which conversations the study of the next turn measures at which scale."""

from typing import Any

from llama_meter.cells import Cell, Decode, Gate, Turns
from llama_meter.measure import plan
from llama_meter.measure.plan import Plan, change, check_scale, files_of, on_file, scale_of
from llama_meter.measure.request import NOTHING, Sweep
from llama_meter.serve import server
from plamo_study.studies.next_turn.conversation import SETTINGS

DEPTHS = {"mini": (200, 1000, 4000), "shape": (1000,)}  # tokens of a conversation; 200: within the window
DEEPEST = 8000  # in the settings that most users have
ANSWER = 16
OF_FULL_SIZE = tuple(SETTINGS.values())[:2]
GENERATED = ("granitehybrid-dense", "qwen35-dense", "llama-dense")  # two hybrids, and attention alone
PATIENCE = 4  # times the usual limit


def turns(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Five moves by depth, on llama-server by setting, the high-level interface, and states kept by ourselves.

    At mini also hybrids of llama.cpp's generator. Other builds measure what neighbours are beside. `sweep`: other
    files, lengths or settings.
    """
    check_scale(scale)
    own = scale_of(scale, sweep)
    how: dict[str, Any] = {"n_threads": plan.threads_of(sweep), "n_gpu_layers": -1 if gpu else 0}
    base = change(Turns(n_gen=ANSWER, seed=plan.one("seed", sweep.seed, 0), **how), **sweep.settings())
    files = files_of(scale, sweep)
    settings = tuple(SETTINGS.values()) if own == "mini" else OF_FULL_SIZE
    lengths = sweep.n_prompt or DEPTHS[own if own in DEPTHS else "shape"]
    cells: list[Cell] = [
        on_file(change(base, n_prompt=n, **setting), file)
        for n in lengths
        for setting in settings
        for file in (files if own != "shape" or not setting else files[:1])  # the others take minutes
    ]
    if own == "mini":
        deep = [] if sweep.n_prompt else [change(base, n_prompt=DEEPEST, **setting) for setting in OF_FULL_SIZE]
        cells += [on_file(cell, file) for cell in deep for file in files]
        short = [change(base, n_prompt=lengths[-2:][0], **setting) for setting in settings]
        cells += [on_file(cell, (model, "", "F32")) for cell in short for model in GENERATED]
    gate = Gate(**plan.gate_tokens(own), **how)
    gates = tuple(plan.gate_of(gate, file) for file in files)
    anchor = on_file(Decode(depth=16, n_gen=32, **how), files[0])
    return Plan(
        "06-turns",
        own,
        tuple(cells),
        gates,
        anchor,
        1 if own == "mini" else 2,
        0,
        PATIENCE * plan.TIME_LIMIT_S[own],
        compared=tuple(cell for cell in cells if isinstance(cell, Turns) and cell.n_clients > 1),
        workload="plamo_study.studies.next_turn.work",
        program=server.BINARY,
        grows=False,
    )
