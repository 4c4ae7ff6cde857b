"""Chapter 2: one account of bytes and FLOPs, ceilings, every recorded cell held against them, machines side by side."""

import pandas as pd
import pytest
from built import longer

from llama_meter import journal, paths
from llama_meter.engine import bindings, kernels
from llama_meter.errors import StudyError
from llama_meter.journal import REFERENCE
from llama_meter.measure import files, process
from llama_meter.measure.worker import Job
from llama_meter.stats import Estimate
from plamo_study.arithmetic import ceilings, roofline
from plamo_study.arithmetic.ceilings import Here
from plamo_study.arithmetic.roofline import parts, work
from plamo_study.measurements import recording
from plamo_study.read import frame
from plamo_study.studies.roofline import law

HOME = ceilings.Place("here", 2)


def fact(name, dtype="Q8_0"):
    return files.planned_fact(name, "shape", dtype)


def moved(account):
    return {part.name: part.bytes for part in account}


@pytest.fixture(scope="module")
def first():
    return recording("01-phase-asymmetry")


# ---------------------------------------------------------------- the account


@pytest.mark.parametrize(
    ("name", "state_mib", "kv_kib", "layers"),
    [
        ("plamo-2-1b", 8.375, 4, (8, 0, 8)),
        ("plamo-3-nict-8b", 0, 64, (0, 28, 4)),
    ],
)
def test_state_and_cache_sizes_are_the_known_ones(name, state_mib, kv_kib, layers):
    model = fact(name)
    mamba, sliding, full = roofline.layers(model)
    assert (mamba, sliding, full) == layers
    assert roofline.state_bytes(model) / 2**20 == state_mib
    assert roofline.kv_bytes_per_token(model) * (sliding + full) / 2**10 == kv_kib


@pytest.mark.parametrize("name", ["plamo-2-1b", "plamo-3-nict-8b"])
def test_a_prompt_in_two_parts_computes_what_it_computes_in_one(name):
    model = fact(name)
    for one, two, three in zip(parts(model, 5000), parts(model, 3000), parts(model, 2000, 3000), strict=True):
        heads = 2 * roofline.head_weights(model) if one.name == "output head" else 0
        assert one.flops + heads == two.flops + three.flops
    assert moved(parts(model, 1, 700, 3))["embedding rows"] == 3 * roofline.head_bytes(model) / model["shape"]["vocab"]


def test_flops_are_two_per_weight_and_token_and_attention_is_quadratic():
    model = fact("plamo-2-1b")
    head = roofline.head_weights(model)
    assert roofline.matmul_weights(model) + head == pytest.approx(1_291_441_920, rel=1e-3)
    assert work(model, 1)[0] == pytest.approx(2 * 1.2914e9, rel=0.01)
    attention = work(model, 1024)[0] - 2 * work(model, 512)[0] + 2 * head
    assert attention == pytest.approx(4 * 16 * 128 * 8 * 512**2, rel=1e-6)


def test_weights_are_read_once_a_micro_batch_and_the_head_where_a_prompt_ends():
    model, untied = fact("plamo-2-1b"), fact("plamo-2-translate")
    blocks = roofline.weight_bytes(model) - roofline.head_bytes(model)
    for tokens, n_seq, together, passes, heads in (
        (512, 1, True, 1, 1),
        (513, 1, True, 2, 1),
        (256, 4, True, 2, 2),
        (256, 4, False, 4, 4),
        (8, 16, True, 1, 1),
    ):
        found = moved(parts(model, tokens, n_seq=n_seq, together=together))
        assert found["weights of the blocks"] == passes * blocks
        assert found["output head"] == heads * roofline.head_bytes(model)
    found = moved(parts(untied, 10))
    assert found["output head"] == untied["tensors"]["output"]["n_bytes"]
    assert found["embedding rows"] * untied["shape"]["vocab"] == 10 * untied["tensors"]["token_embd"]["n_bytes"]


def test_a_step_reads_weights_once_states_of_every_sequence_and_a_cache_that_a_window_bounds():
    model, hybrid = fact("plamo-3-nict-8b"), fact("plamo-2-1b")
    per_layer = roofline.kv_bytes_per_token(model)
    assert roofline.step(model, 1000)[1] - roofline.weight_bytes(model) == per_layer * 32 * 1001
    far, farther = (moved(parts(model, 1, depth))["keys and values read"] for depth in (10_000, 20_000))
    assert farther - far == 4 * 10_000 * per_layer, "past the window only the four full layers read more"
    grown = roofline.step(hybrid, 0, n_seq=3)[1] - roofline.step(hybrid, 0)[1]
    assert grown == 2 * (2 * roofline.state_bytes(hybrid) + 8 * roofline.kv_bytes_per_token(hybrid))
    assert roofline.kv_bytes_per_token(hybrid, "q8_0", "f16") == pytest.approx(128 * (34 / 32 + 2))


def test_a_planned_model_has_the_bytes_of_the_file(first):
    for name in ("plamo-2-1b*", "plamo-3-nict-2b*"):
        assert fact(name.rstrip("*"))["tensors"] == first.facts[name]["tensors"]
        assert parts(fact(name.rstrip("*")), 100, 50, 2) == parts(first.facts[name], 100, 50, 2)


# ---------------------------------------------------------------- intensity, balance, what if


def test_a_turning_point_is_where_intensity_passes_balance():
    model = fact("plamo-3-nict-8b")
    prompt, batch = law.turning(model, 40.0)
    assert law.intensity(model, int(prompt), n_ubatch=int(prompt)) >= 40.0
    assert law.intensity(model, int(prompt) - 1, n_ubatch=int(prompt) - 1) < 40.0
    assert law.intensity(model, 1, law.DEPTH, int(batch) - 1, n_ubatch=int(batch)) < 40.0
    assert law.turning(fact("plamo-2-1b"), 200.0)[1] == float("inf"), "its own states keep a batch under it"


# ---------------------------------------------------------------- every cell


def test_right_results_enter_under_their_own_ceilings(first):
    batches = recording("03-batch-scaling")
    table = law.cells([(each.study, each.rows, each.facts) for each in (first, batches)])
    for each in (first, batches):
        rows = each.rows[each.rows["workload"].isin(["prefill", "decode"])]
        own = table[(table["study"] == each.study) & (table["phase"] == table["workload"])]
        assert 0 < own["n"].sum() <= len(rows) - (rows["verdict"] == "invalid").sum()
    inside = [low <= took.value <= high for low, took, high in table[["low", "measured", "high"]].to_numpy()]
    assert ((table["miss"] == 1) == inside).all()
    assert (table["share"] < 1.2).all()
    own = table[table["study"] == first.study].groupby("n_threads")["compute"]
    assert own.nunique().eq(1).all()
    assert own.first().is_monotonic_increasing
    one_thread = first.rows[(first.rows["workload"] != "read") | (first.rows["n_threads"] == 1)]
    assert set(law.cells([(first.study, one_thread, first.facts)])["n_threads"]) == {1}
    none = law.cells([(first.study, first.rows[first.rows["workload"] != "read"], first.facts)])
    assert none.empty
    assert set(table) == set(none), "a frame without lines has all columns"


def test_ceilings_are_borrowed_from_the_same_machine_only(first):
    limits = first.rows[first.rows["workload"].isin(["read", "matmul"])]
    timed = first.rows[first.rows["workload"] == "decode"]
    elsewhere = longer(limits, limits["status"] == "ok", 10).assign(machine="elsewhere")
    rows, facts = pd.concat([limits, elsewhere]), first.facts | {"elsewhere": {"chip": "another"}}
    both = law.cells([("all", rows, facts), ("a", timed, facts), ("b", timed.assign(machine="elsewhere"), facts)])
    chips = {frame.device_name(each, False) for each in first.facts.values() if "chip" in each}
    assert set(both["chip"]) == {"another", *chips}
    here, there = (both[both["study"] == study].reset_index() for study in "ab")
    for name in ("read", "compute"):
        assert here[name].to_numpy() == pytest.approx(10 * there[name].to_numpy())
    assert law.cells([("all", elsewhere, facts), ("a", timed, facts)]).empty


# ---------------------------------------------------------------- one definition of a ceiling


def kernel_row(rate, dtype="Q2_K", layout="packed", packed=1.0, blas=0.0, **changes):
    """A process that measured a kernel at `rate` FLOP/s with 512 columns; `packed` None: nobody looked."""
    base = {"workload": "matmul", "machine": "here", "n_threads": 2, "n_gpu_layers": 0, "dtype": dtype}
    base |= {"layout": layout, "n_rows": 4096, "n_columns": 0}
    base |= {"anchor": False, "verdict": "n/a", "status": "ok", "drift": 0.0, "block": 0}
    base |= {"n_bytes": 0, "n_flops": 2 * 4096**2 * 512}
    base["checks"] = {} if packed is None else {"packed": packed, "blas": blas}
    row = base | changes
    return row | {"samples_ns": [[round((row["n_flops"] or row["n_bytes"]) / rate * 1e9)]]}


def read_row(rate, **changes):
    reading = {"workload": "read", "dtype": "", "layout": "", "packed": None, "n_flops": 0, "n_bytes": 10**9}
    return kernel_row(rate, **reading | changes)


PLAIN, UNSEEN, BLAS = {"packed": 0.0}, {"packed": None}, {"packed": 0.0, "blas": 1.0}
CEILINGS = {  # rows as (FLOP/s, layout, what was seen, other fields), and the ceiling of Q2_K among them
    "the packed kernel's, whatever the plain one reaches": (379e9, (379e9, "packed", {}), (922e9, "plain", PLAIN)),
    "nobody's who did not look": (922e9, (5e12, "packed", UNSEEN), (922e9, "", UNSEEN)),
    "either's where nothing is packed": (3.2e11, (3e11, "packed", PLAIN), (3.2e11, "", UNSEEN)),
    "that of many columns": (1e11, (1e11, "packed", {}), (9e12, "packed", {"n_columns": 4})),
    "of its type": (1e11, (1e11, "packed", {}), (9e12, "packed", {"dtype": "Q5_K"})),
    "of what ended well": (1e11, (1e11, "packed", {}), (9e12, "packed", {"status": "abort"})),
}


@pytest.mark.parametrize(("best", "one", "other"), CEILINGS.values(), ids=CEILINGS)
def test_a_ceiling_is(best, one, other):
    rows = [kernel_row(rate, layout=layout, **fields) for rate, layout, fields in (one, other)]
    table = ceilings.measured([pd.DataFrame(rows)])
    assert Here([table], HOME).rate("Q2_K").best == pytest.approx(best, rel=1e-6)


def test_what_was_measured_nowhere_here_is_named_and_kernels_are_told_by_name():
    with pytest.raises(StudyError, match="matmul ceiling of Q2_K"):
        Here([ceilings.measured([pd.DataFrame([kernel_row(1e11, n_threads=1)])])], HOME).rate("Q2_K")
    reads = [read_row(5e10), read_row(9e12, n_threads=1), read_row(9e12, machine="there")]
    assert Here([ceilings.measured([pd.DataFrame(reads)])], HOME).rate().best == pytest.approx(5e10, rel=1e-6)
    rows = [kernel_row(2e12, "F16", "", **BLAS), kernel_row(3e12, "Q8_0", "plain", **BLAS), kernel_row(9e11, "Q8_0")]
    names = set(ceilings.measured([pd.DataFrame(rows)])["kernel"])
    assert (len(names), sum("BLAS" in name for name in names)) == (3, 2)


def test_a_files_ceiling_is_the_mix_of_its_types_and_its_own_study_comes_first():
    rows = [read_row(5e10), kernel_row(1e11, "Q2_K"), kernel_row(4e11, "Q3_K", packed=0.0)]
    half = {"type": "mixed", "by_type": {kind: {"n_elements": 10**6, "n_bytes": 10**6} for kind in ("Q2_K", "Q3_K")}}
    model = {"tensors": {"ffn_up": half | {"n_elements": 2 * 10**6, "n_bytes": 2 * 10**6}}}
    own, pooled = (ceilings.measured([pd.DataFrame(each)]) for each in (rows, [*rows, kernel_row(9e11, "Q2_K")]))
    assert Here([own], HOME).limits(model)[0].matmul == pytest.approx(2 / (1 / 1e11 + 1 / 4e11), rel=1e-6)
    assert Here([own, pooled], HOME).rate("Q2_K").best == pytest.approx(1e11, rel=1e-6)
    assert Here([pooled], HOME).rate("Q2_K").best == pytest.approx(9e11, rel=1e-6)


PACKED = dict.fromkeys(("Q4_0", "Q4_K", "IQ4_NL", "MXFP4"), "AVX2 = 1") | {"Q2_K": "AVX512 = 1"}  # as repack.cpp asks


def test_every_type_has_a_kernel_that_takes_time_and_the_known_packing_is_the_engines():
    engine = process.work(Job(), 60.0).measured.facts
    for dtype in bindings.TYPES:
        times, taken = kernels.matmul_times(dtype, (256, 256, 2), 1, False, 1, packed=True)
        assert min(times + kernels.matmul_times(dtype, (64, 256, 2), 1, False, 1, packed=False)[0]) > 0
        if "AVX2 = 1" in engine["build"] and "REPACK = 1" in engine["build"]:
            assert (taken == "packed") == (PACKED.get(dtype, "none") in engine["build"])


# ---------------------------------------------------------------- machines side by side


USUAL = {"model": "m*", "dtype": "Q8_0", "phase": "decode", "tokens": 1, "n_seq": 1, "policy": "shared", "read": 1e9}
USUAL |= {"type_k": "f16", "type_v": "f16", "attention": "on"}


def line(on, seconds, roof, depth=128.0, **changed):
    measured = Estimate(seconds, seconds * 0.9, seconds * 1.1, 5)
    entry = {"machine": on, "chip": f"chip {on}", "depth": depth, "measured": measured, "low": roof}
    return USUAL | entry | {"share": roof / seconds} | changed


def test_only_the_same_pass_of_two_machines_is_compared_and_of_several_depths_the_nearest():
    def common(*lines):
        return list(law.common(pd.DataFrame(lines)))

    one, other = line("a", 0.1, 0.05), line("b", 0.1, 0.05)
    assert len(common(one, other)) == len(common(one, other | {"depth": 190.0})) == 1
    for changed in ({"depth": 200.0}, {"dtype": "Q4_0"}, {"n_seq": 8}, {"attention": "off"}, {"machine": "a"}):
        assert not common(one, other | changed), changed
    assert {"took_source", "share_target", "depth"} <= set(law.pairs(pd.DataFrame([one])))
    ((known, asked),) = common(line("a", 0.1, 0.05, 100.0), line("a", 0.2, 0.05, 130.0), other)
    assert (known.depth, asked.depth) == (130.0, 128.0)
    twice = line("a", 0.1, 0.05, 131.0)
    assert len(common(one, twice, other)) == len(common(other, one, twice)) == 1, "one pass that was timed twice"


def test_machines_of_one_chip_are_told_apart_and_a_recorded_one_bears_its_letter():
    chip = {"chip": "Intel(R) Xeon(R) Gold (family 6)", "performance_cores": 2}
    facts = {name * 16: chip | {"last_level_cache_bytes": size} for size, name in enumerate("abc")}
    names = [frame.machine_name(fact) for fact in frame.distinct_machines(facts)[0].values()]
    assert names == [f"Intel Xeon Gold, 2 cores{mark}" for mark in ("", " (bbbbbbbb)", " (cccccccc)")]
    records = [each for path in journal.journals(paths.MEASURED / REFERENCE) for each in journal.read(path)]
    known = {record.id: record.data for record in records if getattr(record, "what", "") == "machine"}
    assert known.keys() <= frame.HOSTS.keys()
    assert len({letter for letter, _ in frame.HOSTS.values()}) == len(frame.HOSTS)
    assert frame.machine_name(known["dbd2b3acfeaa796f"]) == "AMD EPYC Zen 5, 2 vCPUs (host A)"
