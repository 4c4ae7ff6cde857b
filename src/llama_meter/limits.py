"""Numbers and names that measuring and analysis must agree on, below both of them."""

from collections.abc import Sequence

BACKENDS = {"Metal": "MTL", "CUDA": "CUDA", "Vulkan": "Vulkan"}  # -> prefix of ggml's names of its devices
DEEP_POSITIONS = 32  # of a long prompt and the steps after it that the oracle judges
FIRST_TOKEN = 5  # the lowest ordinary token id; lower ids are special tokens
DRIFT_LIMIT = 0.10  # a block that drifts further is measured again, and is used only where no block is steadier
RIGHT = ("valid", "consistent")  # verdicts of numbers that count: by the oracle, or by the engine against itself
LEAST_BLOCKS = 2  # undisturbed blocks that any statement about a cell needs
NOT_FINITE = 1e300  # an error of this size stands for logits that are no numbers
ROUNDINGS = 3  # a replayed sequence is wrong beyond this multiple of its recording's largest rounding error
# Limits beyond which a row is marked as disturbed, set from 48 processes at shape on two cores, engine threads spinning
# on both. Alone, they waited for 0.010 to 0.015 of a CPU, and others took 0.004 to 0.008 of the machine; beside other
# work they waited for 0.10 to 1.1, and others took 0.05 to 0.54. Involuntary context switches tell them apart less
# well: 60 to 110 a second against 145 to 260. They were held against planted disturbances at commit 53f8ee5.
OTHERS_LIMIT = 0.05  # of the machine's CPUs, taken by other processes or other guests
WAITED_LIMIT = 0.05  # of a CPU: the worker's threads ready to run, and none free
LOAD_LIMIT = 0.5  # of rows without evidence: runnable threads beyond the journal's own, over the minute before
THROTTLED_LIMIT = 0.05  # of a CPU: a quota held the worker's control group
# Of the CPUs that a worker's threads could fill. Those of 1,300 recorded rows of half a second or more fill 0.87 and
# more where nothing else took CPUs; two threads on a quota of one CPU fill 0.5.
COMPUTED_LIMIT = 0.8
STARVED_LIMIT = 0.1  # of a CPU: a worker past its time limit that waited more than this is starved, not hung
LATE_S = 1.0  # a check on a worker that is this late: the machine slept or stalled, or the runner was stopped
PRESSURES = ("nominal", "moderate", "heavy", "trapping", "sleeping")  # OSThermalPressureLevel 0 to 4 of macOS
LONG_NS = 500_000_000  # a timed part at least this long resolves others' CPU time, which is counted in units of 10 ms
SCAN_FLOPS = 6  # per state element and token: decay, input, add (3), output multiply-add (2), and exp's multiply


def backend(device: str) -> str:
    """The backend of a GPU by ggml's name of the device, such as "CUDA0"; that name for one that is not known here."""
    return next((name for name, start in BACKENDS.items() if device.startswith(start)), device)


DEFECTS = {  # of llama.cpp's PLaMo 2, by their codes in engine.toml, which recorded engines carry in `corrects`
    "D1": "lost rotation",
    "D2": "mixed prompts",
    "D3": "misplaced states",
    "D4": "split projections",
    "D5": "half-precision overflow",
}
BUILDS = {
    (): "stock",
    ("D1",): "corrected-rotation",
    ("D2",): "corrected-prompts",
    ("D3",): "corrected-states",
    ("D2", "D3"): "corrected",
    ("D2", "D3", "D4"): "corrected-projections",
    ("D2", "D3", "rollback"): "rollback",
}  # short enough for a chart; the names of `plamo-study engine build`


def defect(code: str) -> str:
    """A defect's name, or any other word of a build (e.g. `window`) unchanged."""
    return DEFECTS.get(code, code)


def build_name(corrects: Sequence[str]) -> str:
    """A build's name by what it corrects: "stock" for nothing, its build name, else the defects' names joined."""
    return BUILDS.get(tuple(corrects)) or " + ".join(map(defect, corrects))
