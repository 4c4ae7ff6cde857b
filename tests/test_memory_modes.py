"""Two speeds of one file: found where they are planted, told from noise and from drift, and controlled by a reading."""

import msgspec
import numpy as np
import pandas as pd
import pytest
from conftest import mini, mini_file

from plamo_study.measure import machine, recording, workloads
from plamo_study.measure.cells import Read
from plamo_study.measure.process import work
from plamo_study.measure.rows import Conditions, Measured, Row
from plamo_study.measure.worker import Job
from plamo_study.studies.quantization import (
    analysis as study,
)

BYTES = 10**9
FILES = {("m", dtype): {"file_bytes": BYTES} for dtype in ("F16", "Q4_0")}
SLOW, FAST = 45e9, 60e9


def row(rate, block, **fields):
    """A process that reads at `rate`; `rate` may be one number a sample."""
    rates = np.broadcast_to(rate, 10)
    base = {"workload": "decode", "model": "m", "dtype": "F16", "n_seq": 1, "use_mmap": True, "cold": False}
    base |= {"anchor": False, "status": "ok", "verdict": "valid", "drift": 0.0, "n_gpu_layers": 0, "n_threads": 2}
    base |= {"prefill_ns": [10**9], "series": {}, "n_bytes": 0, "label": "", "block": block, "started": f"{block:03d}"}
    return base | {"samples_ns": [[int(BYTES * 1e9 / r) for r in rates]]} | fields


def rates(*rows):
    return study.rates(pd.DataFrame(rows), FILES)


def noisy(rng, middle, n, **fields):
    return [row(middle * np.exp(rng.normal(0, 0.03)), block, **fields) for block in range(n)]


def test_planted_modes_are_found_and_noise_is_none():
    rng = np.random.default_rng(0)
    two = study.spreads(rates(*noisy(rng, SLOW, 3), *noisy(rng, FAST, 3)))
    assert two["modes"].tolist() == [True]
    assert two["gap"].iloc[0] > study.APART
    found = [study.spreads(rates(*noisy(rng, SLOW, 6)))["modes"].iloc[0] for _ in range(50)]
    assert sum(found) == 0


# ---------------------------------------------------------------- the control


def with_reading(rate, read, block):
    return row(rate, block, series={"read": [read, read, read]})


def test_readings_explain_steps_that_waited_for_the_same_memory():
    rows = pd.DataFrame([with_reading(rate, 1.2 * rate, b) for b, rate in enumerate((40e9, 44e9, 48e9, 60e9, 62e9))])
    rank, p, read_range, step_range = study.explained(rows)
    assert (rank, p) == pytest.approx((-1.0, 0.0), abs=1e-6)
    assert (read_range, step_range) == pytest.approx((62 / 40, 62 / 40), rel=1e-6)


def test_readings_that_go_their_own_way_explain_nothing():
    reads = (50e9, 20e9, 60e9, 30e9, 40e9)
    rows = pd.DataFrame([with_reading(SLOW * (1 + b / 100), read, b) for b, read in enumerate(reads)])
    _, p, read_range, step_range = study.explained(rows)
    assert p > 0.05
    assert read_range == pytest.approx(3.0)
    assert step_range < 1.05
    assert np.isnan(study.explained(rows.head(1))).all()


def test_a_decode_too_large_for_the_caches_reads_memory_beside_its_steps(monkeypatch):
    cell = mini("decode", n_prompt=4, n_gen=2)
    monkeypatch.setattr(machine, "last_level_cache", lambda: 1 << 20)
    large = workloads.run(cell, mini_file(), 0, lambda stage: None)
    assert len(large.series["read"]) == workloads.BESIDE_PASSES
    assert min(large.series["read"]) > 0
    monkeypatch.setattr(machine, "last_level_cache", lambda: 1 << 30)
    assert "read" not in workloads.run(cell, mini_file(), 0, lambda stage: None).series


@pytest.mark.parametrize("fields", [{"use_mmap": False}, {"cold": True}])
def test_however_the_weights_lie_the_computation_is_right(fields):
    cell = msgspec.structs.replace(mini("decode", n_prompt=8, n_gen=4), **fields)
    outcome = work(Job(cell=cell, path=str(mini_file())), 60.0)
    assert outcome.measured.valid, (outcome.measured.checks, outcome.failure)


# ---------------------------------------------------------------- two machines in one journal


def measured_on(name, started):
    cell = Read(dtype="Q8_0", n_bytes=1)
    common = {"schema": 1, "study": "s", "cell": cell, "replicate": 0, "block": 0, "order": 0, "engine": "e", "pid": 1}
    common |= {"status": "ok", "elapsed_ns": 1, "conditions": Conditions(load_1min=0.0)}
    return Row(key=name + started, machine=name, started=started, **common)


def test_rows_of_two_machines_never_stand_in_one_frame():
    rows = [measured_on("old", "2026-01-01"), measured_on("new", "2026-01-03"), measured_on("old", "2026-01-02")]
    assert {r.machine for r in recording.of_one_machine(rows)} == {"new"}
    assert Measured().series == {}


# ---------------------------------------------------------------- experiments
