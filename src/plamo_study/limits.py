"""Numbers that measuring and analysis must agree on, below both of them."""

FIRST_TOKEN = 5  # of a vocabulary: ids below are special tokens
DRIFT_LIMIT = 0.10  # a block further than this from the others is measured again, and used only where none are steadier
LEAST_BLOCKS = 2  # undisturbed, without which nothing is said of a cell
ROUNDINGS = 3  # a replayed sequence is wrong beyond so many times the largest rounding error of its recording
DRAWS = 8  # of each control of a scan: chunk k belongs to draw k mod DRAWS
# What marks a row: limits between what 48 processes at shape met on two cores, engine threads spinning on both. Alone
# on the machine they waited for 0.010 to 0.015 of a CPU, and others took 0.004 to 0.008 of the machine; beside other
# work they waited for 0.10 to 1.1, and others took 0.05 to 0.54. Involuntary context switches tell them apart less
# well: 60 to 110 a second against 145 to 260. selfcheck --disturb holds the limits against planted disturbances.
OTHERS_LIMIT = 0.05  # of the machine's CPUs, taken by other processes or other guests
WAITED_LIMIT = 0.05  # of a CPU: the worker's threads ready to run, and none free
LOAD_LIMIT = 0.5  # of rows without evidence: runnable threads beyond the journal's own, over the minute before
STARVED_LIMIT = 0.1  # of a CPU: a worker past its time limit that waited so much is starved and does not hang
LATE_S = 1.0  # a look at a worker that comes so much late: the machine slept or stood still, or the runner was stopped
GPU_LIMIT = 0.25  # of a GPU in use just after a worker that left it alone; a judgement, held against nothing yet
PRESSURES = ("nominal", "moderate", "heavy", "trapping", "sleeping")  # OSThermalPressureLevel 0 to 4 of macOS
LONG_NS = 500_000_000  # a timed part of this length tells others' CPU time from the 10 ms in which it is counted
