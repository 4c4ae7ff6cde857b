"""A worker whose prefill never ends where SLEEPING is set, and is over at once elsewhere."""

import os
import time

from plamo_study.measure.rows import Measured
from plamo_study.measure.worker import main


def prefill(cell, path, stage, *others):
    time.sleep(3600 if "SLEEPING" in os.environ else 0)
    return Measured(valid=True, samples_ns=[[1]])


if __name__ == "__main__":
    main({"prefill": prefill})
