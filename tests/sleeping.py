"""A workload whose prefill never ends where PLAMO_STUDY_SLEEPING is set, and is over at once elsewhere."""

import os
import time

from llama_meter.cells import Prefill
from llama_meter.rows import Measured


def prefill(cell, path, stage, *others):
    time.sleep(3600 if "PLAMO_STUDY_SLEEPING" in os.environ else 0)
    return Measured(valid=True, samples_ns=[[1]])


RUNS = {Prefill: prefill}
