"""Rates are set beside those of llama.cpp's tools: same sizes, answers read, failures said.

The tools themselves are built by whoever compares; here a script stands for each and prints what they print.
"""

import json
import sys

import pytest
from conftest import mini, mini_file
from crosscheck import llama_bench as crosscheck

from plamo_study.errors import StudyError

SCRIPT = """#!{python}
import json, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
open({log!r}, "a").write(json.dumps(arguments) + "\\n")
{body}
"""
BATCHED = 'print("noise"); print(json.dumps({"t_pp": 100.0 * int(arguments["-npl"]), "t_tg": 7.0}))'
BENCH = 'print(json.dumps([{"samples_ns": [5e9]}]))'


def tool(folder, body):
    path, log = folder / "tool", folder / "log"
    path.write_text(SCRIPT.format(python=sys.executable, log=str(log), body=body))
    path.chmod(0o755)
    return path, log


def test_a_batch_is_compared_at_the_same_sizes_round_by_round(tmp_path):
    path, log = tool(tmp_path, BATCHED)
    ratios = crosscheck.batched_bench(mini("overhead"), mini_file(), path, rounds=1)
    assert list(ratios) == [f"{what} of {n}" for n in (1, 4, 16) for what in ("S_PP", "S_TG")]
    assert all(ratio.n == 1 for ratio in ratios.values())
    assert ratios["S_PP of 16"].value > 16 * 100 / 10, "ours took seconds, theirs hundreds of them"
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    assert [call["-npl"] for call in asked] == ["1", "4", "16"]
    assert {(call["-npp"], call["-ntg"], call["-m"]) for call in asked} == {
        (str(crosscheck.BATCH_PROMPT), str(crosscheck.BATCH_STEPS), str(mini_file()))
    }
    assert all(int(call["-c"]) == int(call["-npl"]) * (int(call["-npp"]) + int(call["-ntg"])) for call in asked)


def test_both_phases_are_compared_with_llama_bench(tmp_path):
    path, log = tool(tmp_path, BENCH)
    ratios = crosscheck.llama_bench(mini("overhead"), mini_file(), path, rounds=1)
    assert set(ratios) == {"prefill", "decode"}
    assert all(ratio.value > 1 for ratio in ratios.values())
    assert [json.loads(line)["-p"] for line in log.read_text().splitlines()] == ["512", "0"]


def test_a_tool_that_fails_is_named(tmp_path):
    path, _ = tool(tmp_path, 'sys.exit("no such model")')
    with pytest.raises(StudyError, match="no such model"):
        crosscheck.batched_bench(mini("overhead"), mini_file(), path, rounds=1)
