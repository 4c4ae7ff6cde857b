"""Cells of the serving study: single requests by length, concurrent requests, rates, and the engine's parts.

It covers the servers that can be started here: `llama_cpp.server` if its web framework is installed, and llama-server
if one is found. The engine alone is timed on the same prompts and decode steps; predictions are made from these
times.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from plamo_study.measure import server
from plamo_study.measure.cells import Cell, Serving
from plamo_study.measure.plan import DTYPE, MODELS, Plan, change, check_scale, with_gates

PROMPTS, ANSWERS = (128, 512, 2048), (16, 64, 256)  # tokens, of the exercise that this notebook answers
SHORT = {"mini": (128, 64), "shape": (128, 16), "weights": (128, 16)}  # of the loads
ASIDE = (128, 16)  # of the server in Python
AT_ONCE = (1, 2, 4, 8, 16)  # concurrent requests on 16 slots
WAITING = (16, 64, 256)  # concurrent requests on SLOTS slots
SLOTS = 4  # llama-server's own default
ALONE = 2  # requests of a cell that asks one at a time
LOADED = {"mini": 24, "shape": 8, "weights": 8}  # of a concurrent cell that checks answers
FEWEST = 8  # of a cell that measures times, and at least two per client
SOUGHT = {"mini": 16, "shape": 8, "weights": 8}  # of each rate that is tried for the knee
STEPS = 16  # decode steps timed by themselves
BLOCKS = {"mini": 2, "shape": 3, "weights": 3}
SEARCHES = 7  # servers of the knee study, each with its own arrivals
SUSTAINED = 96  # requests at each rate there: sixteen within a tenth of a second are a burst, not a rate
PATIENCE = 2  # times the usual limit
LLAMA, PYTHON = "llama-server", "llama_cpp.server"
ENOUGH = 0.9  # of the requests of a rate that a server sustains meet its objectives


@dataclass(frozen=True)
class Objectives:
    """Latency objectives in seconds: time to the first token, and mean time per further token."""

    ttft_s: float
    tpot_s: float

    def met(self, due_ns: int, token_ns: Sequence[int], failure: str) -> bool:
        """Whether a request met both objectives; a failed request never does."""
        if failure or not token_ns:
            return False
        rest = (token_ns[-1] - token_ns[0]) / max(len(token_ns) - 1, 1)
        return token_ns[0] - due_ns <= self.ttft_s * 1e9 and rest <= self.tpot_s * 1e9


OBJECTIVES = {"mini": Objectives(0.25, 0.01), "shape": Objectives(10.0, 0.4), "weights": Objectives(10.0, 0.4)}


def serving(scale: str, gpu: bool = False) -> Plan:
    """Notebook 11: every server found here; without llama-server, the Python server, whose rows say what is missing."""
    check_scale(scale)
    base = Serving(scale=scale, dtype=DTYPE[scale], n_gpu_layers=-1 if gpu else 0, model=MODELS[0])
    base = change(base, n_threads=server.threads(), n_seq=SLOTS, n_prompt=SHORT[scale][0], n_gen=SHORT[scale][1])
    both = [change(base, model=model) for model in MODELS]
    has_llama = server.find() is not None
    has_python = server.has_python_server() or not has_llama
    needed: list[Cell] = []
    others: list[Cell] = []
    compared: list[Cell] = []
    for each in both if has_llama else ():
        needed += [_closed(each, SLOTS, 4, LOADED[scale]), _closed(each, SLOTS, 1, ALONE)]
        others += [_closed(each, SLOTS, 2, LOADED[scale])]
        others += [_of(each, *lengths) for lengths in product(PROMPTS, ANSWERS)]
        others += [_closed(each, AT_ONCE[-1], n, max(FEWEST, 2 * n)) for n in AT_ONCE]
        others += [change(each, server=LLAMA, n_clients=0, pattern="knee", n_requests=SOUGHT[scale])]
        crowd = WAITING if each.model == MODELS[1] and scale == "mini" else ()  # the first model's slots are mixed up
        others += [_closed(each, SLOTS, n, 2 * n) for n in crowd]
    for each in both if has_python else ():
        ours = change(each, server=PYTHON, n_seq=1)
        aside = [_of(ours, *ASIDE), change(_of(ours, *ASIDE), n_clients=4, n_requests=FEWEST)]
        (others if has_llama else needed).extend(aside)
    needed += [part for each in both for part in _parts(each, (), PROMPTS[:1])]
    others += [part for each in both for part in _parts(each, AT_ONCE if has_llama else (), PROMPTS)]
    cells = tuple(dict.fromkeys([*needed, *others]))
    fitting = tuple(cell for cell in cells if not isinstance(cell, Serving)) or cells
    planned = with_gates("11-serving", scale, fitting, exact_cache=False)
    compared = [cell for cell in cells if isinstance(cell, Serving) and _compared(cell)]
    n = len(dict.fromkeys(needed))
    planned = replace(planned, cells=cells, compared=tuple(compared), needed=n, extra_blocks=0)
    limit = PATIENCE * planned.time_limit_s
    return replace(planned, blocks=BLOCKS[scale], time_limit_s=limit, workload=f"{__package__}.workload")


def knees(scale: str, gpu: bool = False) -> Plan:
    """The knee alone, on enough servers of each model for a meaningful interval."""
    whole = serving(scale, gpu)
    sought = [cell for cell in whole.cells if isinstance(cell, Serving) and cell.pattern == "knee"]
    cells = tuple(change(cell, n_requests=SUSTAINED) for cell in sought)
    compared = tuple(change(cell, n_requests=SUSTAINED) for cell in sought if cell in whole.compared)
    planned = replace(whole, study="11-knees", cells=cells, compared=compared, needed=max(len(cells), 1))
    return replace(planned, blocks=SEARCHES)


def _closed(base: Serving, n_slots: int, n_clients: int, n_requests: int) -> Serving:
    return change(base, server=LLAMA, n_seq=n_slots, n_clients=n_clients, n_requests=n_requests)


def _of(base: Serving, n_prompt: int, n_gen: int) -> Serving:
    return change(base, n_prompt=n_prompt, n_gen=n_gen, n_clients=1, n_requests=ALONE)


def _compared(cell: Serving) -> bool:
    """Whether other builds measure the cell too: concurrent requests to the first model."""
    return cell.server == LLAMA and cell.model == MODELS[0] and cell.n_clients != 1


def _parts(base: Serving, at_once: tuple[int, ...], lengths: tuple[int, ...]) -> list[Cell]:
    """Cells of the engine alone: prompts, a decode step after each, and batched steps after the shortest."""
    step = change(base, workload="decode", depth=base.n_prompt, n_gen=STEPS, n_seq=1, policy="shared")
    alone = [change(base, workload="prefill", n_prompt=n, n_seq=1, repetitions=3) for n in lengths]
    return [*alone, *(change(step, depth=n) for n in lengths), *(change(step, n_seq=n) for n in at_once)]
