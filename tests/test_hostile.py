"""Files from strangers: every one ends in a finding or a right answer, in time, in memory, and in its own process."""

import json
import subprocess
import sys
from pathlib import Path

import hostile
import pytest

N, GATED = 220, 3


@pytest.mark.long
@pytest.mark.timeout(110)
def test_every_mutant_ends_in_a_finding_or_a_right_answer_within_limits(tmp_path: Path):
    command = [sys.executable, hostile.__file__, str(tmp_path), str(N), str(GATED)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    *rows, last = (json.loads(line) for line in done.stdout.splitlines())
    assert len(rows) == N
    assert [row for row in rows if row["kind"] not in ("found", "passed") or row["left"] or not row["printable"]] == []
    assert [row["name"] for row in rows if row["seconds"] > hostile.LIMIT_S] == []
    assert last["peak_rss"] < hostile.LIMIT_BYTES
    gated = [row for row in rows if row["gate"]]
    assert len(gated) == GATED
    assert [row for row in gated if row["kind"] == "passed" and not {"gate", "range"} & set(row["codes"])] == []
    passed = [row["name"].split()[1] for row in rows if row["kind"] == "passed"]
    assert len(passed) < N / 4
    assert "cut" not in passed
    assert len({code for row in rows for code in row["codes"]}) > 25, "mutants of many kinds"
