"""Two speeds of one file: found where they are planted, told from noise and from drift, and controlled by a reading."""

import msgspec
import numpy as np
import pandas as pd
import pytest
from conftest import HYBRID, mini, mini_file

from plamo_study.measure import machine, recording, workloads
from plamo_study.measure.cells import Read, columns
from plamo_study.measure.process import work
from plamo_study.measure.rows import Conditions, Measured, Row, row_key
from plamo_study.measure.worker import Job
from plamo_study.studies import registry as studies
from plamo_study.studies.quantization import (
    analysis as study,
    plan as plan_quantization,
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


def reading(rate, block):
    return row(rate, block, workload="read", model="", dtype="Q8_0", n_bytes=BYTES, prefill_ns=[], verdict="n/a")


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


def test_one_odd_process_is_an_outlier_and_no_mode():
    rng = np.random.default_rng(1)
    assert not study.spreads(rates(*noisy(rng, SLOW, 5), row(2 * SLOW, 5)))["modes"].any()


def test_a_rate_that_changes_inside_a_process_is_seen_there():
    found = rates(row(SLOW, 0), row([SLOW] * 5 + [FAST] * 5, 1))
    assert found["inside"].tolist() == pytest.approx([1.0, FAST / SLOW], rel=1e-6)


def test_a_product_of_weights_left_as_the_file_holds_them_is_another_cell():
    product = {"workload": "matmul", "n_bytes": BYTES, "verdict": "n/a", "model": ""}
    found = rates(row(SLOW, 0, label="packed", **product), row(FAST, 0, label="plain", **product))
    assert found["rate"].tolist() == pytest.approx([SLOW])


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


def test_cells_of_before_keep_their_keys():
    cell = mini("decode", n_prompt=8, n_gen=4)
    assert b"mmap" not in msgspec.json.encode(cell)
    assert b"cold" not in msgspec.json.encode(cell)
    assert row_key("s", cell, "", "", "", 0) != row_key("s", msgspec.structs.replace(cell, cold=True), "", "", "", 0)


def test_the_plan_tells_file_pages_and_memory_apart():
    cells = plan_quantization.modes("mini").cells
    assert {(told["workload"], told["use_mmap"], told["cold"]) for told in map(columns, cells)} == {
        ("decode", True, False), ("decode", True, True), ("decode", False, False), ("matmul", True, False),
    }  # fmt: skip
    assert {model for cell in cells for model, _, _ in cell.files} == {HYBRID}


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


def test_experiments_are_recorded_and_never_measured_by_a_live_notebook():
    live = {study for study, _ in studies.of_notebook("04", "mini")}
    assert live
    assert not any(studies.STUDIES[study].aside for study in live)
