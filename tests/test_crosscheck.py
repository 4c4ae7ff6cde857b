"""Rates and figures are set beside those of other tools: same sizes, answers read, failures said.

The tools themselves are built by whoever compares; here a script stands for each and prints what they print.
"""

import json
import sys

import pandas as pd
import pytest
from conftest import mini, mini_file
from crosscheck import ceilings as beside, llama_bench as crosscheck, perplexity

from llama_meter import paths
from llama_meter.errors import StudyError
from llama_meter.measure import plan, result_file
from plamo_study.laws import checked_ceilings

SCRIPT = """#!{python}
import json, os, sys
said, arguments = sys.argv[1:], dict(zip(sys.argv[1::2], sys.argv[2::2]))
large = "hugetlb=1" in os.environ.get("GLIBC_TUNABLES", "")
open({log!r}, "a").write(json.dumps(arguments) + "\\n")
{body}
"""
BATCHED = 'print("noise"); print(json.dumps({"t_pp": 100.0 * int(arguments["-npl"]), "t_tg": 7.0}))'
BENCH = 'print(json.dumps([{"samples_ns": [5e9]}]))'
LISTS = """if said == ["-a"]:
    print("load - reads\\ncopy - copies\\nstream - triad")
elif said == ["-h"]:
    print("Version 5.2")
else:
    """
RATES = 'print("MByte/s:\\t2000.5" if large else "MByte/s:\\t1000.5")'


def tool(folder, body, name="tool"):
    path, log = folder / name, folder / "log"
    path.write_text(SCRIPT.format(python=sys.executable, log=str(log), body=body))
    path.chmod(0o755)
    return path, log


def likwid(folder, body):
    return tool(folder, LISTS + body, "likwid-bench")[0]


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


# ---------------------------------------------------------------- ceilings


@pytest.mark.whole
def test_ceilings_are_run_beside_the_tool_and_every_rate_is_kept(tmp_path, monkeypatch):
    read, matmul = plan.both_ceilings("mini")
    small = plan.change(read, n_bytes=1 << 22), plan.change(matmul, n_rows=128)
    monkeypatch.setattr(plan, "both_ceilings", lambda _: small)
    monkeypatch.setattr(beside, "READS", 3)
    monkeypatch.setattr(beside, "PRODUCTS", 2)
    found = beside.side_by_side("mini", likwid(tmp_path, RATES), 2)
    assert {run.round for run in found.runs if run.what == checked_ceilings.READ} == {0, 1}
    for run in (run for run in found.runs if run.what.startswith("likwid")):  # pages as large as ours, and small ones
        assert run.rates == [1000.5e6 if "small pages" in run.what else 2000.5e6]
    assert {checked_ceilings.LIKE_WITH_LIKE, "likwid-bench, read only, small pages"} <= {run.what for run in found.runs}
    assert all(len(run.rates) == 3 for run in found.runs if run.what == checked_ceilings.READ)
    assert all(len(run.rates) == 2 for run in found.runs if run.what in ("NumPy", checked_ceilings.MATMUL))
    assert found.tools["NumPy"].startswith("NumPy")
    assert "kernels" in found.tools["NumPy"]
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    result_file.keep(found, "local", checked_ceilings.NAME)
    assert checked_ceilings.load("local") == found
    assert checked_ceilings.load("reference") is None
    (tmp_path / "local" / checked_ceilings.NAME).write_text("{")
    with pytest.raises(StudyError, match="damaged"):
        checked_ceilings.load("local")
    for body, said in (('sys.exit("no such kernel")', "no such kernel"), ('print("nothing")', "printed no MByte/s")):
        with pytest.raises(StudyError, match=said):
            beside.side_by_side("mini", likwid(tmp_path, body), 1)


def test_rates_are_work_over_time_and_ratios_are_paired():
    runs = [(checked_ceilings.READ, n, [rate / 2, rate]) for n, rate in enumerate((3.0, 6.0, 9.0))]
    runs += [(checked_ceilings.LIKE_WITH_LIKE, n, [rate]) for n, rate in enumerate((2.0, 4.0, 6.0))]
    table = pd.DataFrame(runs, columns=["what", "round", "rates"])
    rates = checked_ceilings.rates(table).set_index("what")
    assert rates.loc[checked_ceilings.READ, "rate"].value == pytest.approx(4.0), "two equal amounts at 3 and 6"
    ratio = checked_ceilings.ratios(table).iloc[0]
    assert ratio["ratio"].value == pytest.approx(1.0)
    assert ratio["verdict"] == "holds"


# ---------------------------------------------------------------- llama-perplexity

SAMPLE = """\
====== Perplexity statistics ======
Mean PPL(Q)                   : 3998.760599 ± 264.122450
Mean PPL(base)                : 4060.209435 ± 268.011319
Mean PPL(Q)/PPL(base)         :   0.984866 ±   0.033778

====== KL divergence statistics ======
Mean    KLD:   0.527664 ±   0.007078
Maximum KLD:   2.145181
99.9%   KLD:   1.796250
99.0%   KLD:   1.334187
95.0%   KLD:   0.916328
90.0%   KLD:   0.820134
Median  KLD:   0.482282
10.0%   KLD:   0.303210

====== Token probability statistics ======
Mean    Δp: -0.000 ± 0.017 %
99.9%   Δp:  3.780%
RMS Δp    :  0.537 ± 0.076 %
Same top p: 34.706 ± 1.491 %
"""


def test_what_llama_perplexity_prints_is_read():
    assert perplexity.parse(SAMPLE) == pytest.approx(
        {
            "perplexity": 3998.760599,
            "mean KLD": 0.527664,
            "50 % KLD": 0.482282,
            "90 % KLD": 0.820134,
            "99 % KLD": 1.334187,
            "99.9 % KLD": 1.79625,
            "RMS Δp": 0.00537,
            "same top": 0.34706,
        }
    )
    base = "[1]4132.7176,[2]3941.7883,\n0.00.836.086 I Final estimate: PPL = 4060.2140 +/- 268.01177\n"
    assert perplexity.parse(base) == {"perplexity": 4060.214}
    with pytest.raises(StudyError, match=r"printed no result \(error: no such file"):
        perplexity.parse("error: no such file\n")
