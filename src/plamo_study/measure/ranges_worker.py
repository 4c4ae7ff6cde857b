"""The process that one file is probed in."""

from pathlib import Path

import msgspec

from plamo_study.engine import library
from plamo_study.measure import machine, range_probe, worker
from plamo_study.measure.cells import Ranges
from plamo_study.measure.ranges import Probing
from plamo_study.measure.rows import Measured


def _probe(job: Probing) -> Measured:
    library.capture_log([])
    threads = job.n_threads or machine.performance_cores()
    cell = Ranges(n_prompt=job.n_prompt, n_gen=job.n_gen, text=job.text, n_threads=threads)
    cell = msgspec.structs.replace(cell, n_gpu_layers=job.n_gpu_layers, flash_attn="off")  # which hides kqv
    return range_probe.probe(cell, Path(job.path), worker.stage, whole=True)


if __name__ == "__main__":
    worker.serve(Probing, _probe)
