"""Notebook 13: several machines side by side, what one says about another, and the names that pages give them."""

import shutil
import tarfile
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from llama_meter import journal, packs, paths
from llama_meter.engine import builds
from llama_meter.errors import StudyError
from llama_meter.journal import LOCAL, OTHERS, REFERENCE
from llama_meter.stats import Estimate
from llama_meter.workloads import chunk_calls
from plamo_study.laws import gpu, machines
from plamo_study.plans import chunked, registry
from plamo_study.read import metrics, processors
from plamo_study.read.frame import unstarred

USUAL = {"model": "m*", "dtype": "Q8_0", "phase": "decode", "tokens": 1, "n_seq": 1, "policy": "shared",
         "type_k": "f16", "type_v": "f16", "attention": "on", "read": 1e9}  # fmt: skip


@pytest.fixture(scope="module")
def studies():
    return machines.recordings("recorded", "shape")


def line(machine, seconds, roof, depth=128.0, **changed):
    measured = Estimate(seconds, seconds * 0.9, seconds * 1.1, 5)
    entry = {"machine": machine, "chip": f"chip {machine}", "depth": depth, "measured": measured, "low": roof}
    return USUAL | entry | {"share": roof / seconds} | changed


def test_a_pair_holds_what_both_forecasts_start_from():
    """The other machine reads half as fast, and its roof is three times as high."""
    found = pd.DataFrame([line("a", 0.10, 0.05), line("b", 0.30, 0.15, read=0.5e9)])
    told = machines.pairs(found).iloc[0]
    assert (told["known"], told["asked"]) == ("chip a", "chip b")
    assert told["took_known"].value * told["roof_asked"] / told["roof_known"] == pytest.approx(0.30)
    assert told["took_known"].value * told["read_known"] / told["read_asked"] == pytest.approx(0.20)
    assert (told["share_known"], told["share_asked"]) == (pytest.approx(0.5), pytest.approx(0.5))


def test_only_the_same_pass_of_two_machines_is_compared_and_of_several_depths_the_nearest():
    def common(*lines):
        return list(machines.common(pd.DataFrame(lines)))

    first, other = line("a", 0.1, 0.05), line("b", 0.1, 0.05)
    assert len(common(first, other)) == len(common(first, other | {"depth": 190.0})) == 1
    for changed in ({"depth": 200.0}, {"dtype": "Q4_0"}, {"n_seq": 8}, {"phase": "prefill"}, {"attention": "off"},
                    {"machine": "a"}):  # fmt: skip
        assert not common(first, other | changed), changed
    assert {"took_known", "share_asked", "depth"} <= set(machines.pairs(pd.DataFrame([first])))
    ((known, asked),) = common(line("a", 0.1, 0.05, 100.0), line("a", 0.2, 0.05, 130.0), other)
    assert (known.depth, asked.depth) == (130.0, 128.0)
    twice = line("a", 0.1, 0.05, 131.0)
    assert len(common(first, twice, other)) == len(common(other, first, twice)) == 1, "one pass that was timed twice"


@pytest.mark.long
def test_the_recorded_machines_share_passes_and_reach_part_of_their_ceilings(studies):
    found = machines.passes(studies)
    assert found["machine"].nunique() >= 3
    on_gpu = found["machine"].str.endswith(machines.ON_GPU)
    assert found[~on_gpu]["share"].between(0.1, 1.1).all()
    assert found[on_gpu]["share"].between(0, 1).all(), "operators that go back to the processor take most of a pass"
    assert set(machines.machines(studies, found)["machine"]) == set(found["machine"])
    told = machines.pairs(found)
    assert (told["known"] != told["asked"]).all()
    assert [board.chip for backend in gpu.FORECASTS for board in gpu.boards(studies, backend)] == ["NVIDIA H200"]
    assert {each["key"] for backend in gpu.FORECASTS for each in gpu.foretold(backend)} == set(gpu.MEASURES)


def test_a_pack_that_is_tracked_is_recorded_and_one_that_is_not_is_live_only(tmp_path, monkeypatch):
    source = paths.MEASURED / REFERENCE
    monkeypatch.setattr(paths, "MEASURED", tmp_path / "measured")
    for place, study in ((REFERENCE, "05-context.shape.jsonl"), (LOCAL, "01-phase-asymmetry.shape.jsonl")):
        (paths.MEASURED / place).mkdir(parents=True)
        shutil.copy(source / study, paths.MEASURED / place)
    made = packs.pack(LOCAL, registry.STUDIES)
    path = tmp_path / f"{made.machine}{packs.SUFFIX}"
    path.write_bytes(made.data)
    shutil.rmtree(paths.MEASURED / LOCAL)

    def seen(how):
        return {rows["machine"].iloc[0] for _, rows, _ in machines.recordings(how, "shape")}

    packs.add(path, registry.STUDIES)
    assert made.machine in seen("live") - seen("recorded")
    packs.add(path, registry.STUDIES, OTHERS)
    assert made.machine in seen("recorded")


def test_what_cannot_be_shown_is_refused_with_what_to_do(monkeypatch, tmp_path):
    for wrong in (("elsewhere", "shape"), ("recorded", "huge")):
        with pytest.raises(StudyError, match="known"):
            machines.recordings(*wrong)
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    with pytest.raises(StudyError, match="plamo-study run 01 --scale mini"):
        machines.recordings("live", "mini")


# ---------------------------------------------------------------- a GPU, planted


@pytest.fixture(scope="module")
def with_a_gpu(studies):
    """The recorded rows of one machine's studies 01 and 03, and the same ten times as fast on a GPU planted in it."""
    found = []
    for name, rows, facts in studies:
        if name not in (gpu.ASYMMETRY, gpu.BATCHES) or rows["build"].eq("").all() or _offloads(rows):
            continue
        rows = rows[~((rows["workload"] == "decode") & (rows["n_gen"] == 32))]  # one decode a device, as it is planned
        board = {"gpus": [{"name": "CUDA0", "chip": "Board", "memory_bytes": 1 << 37}]}
        facts = facts | {"host": facts[rows["machine"].iloc[0]] | board, "scan": facts[rows["engine"].iloc[0]]}
        offloaded = rows.assign(machine="host", n_gpu_layers=-1, samples_ns=faster(rows, 10))
        scans = offloaded[(offloaded["build"] == gpu.STOCK) & (offloaded["model"] != "")]
        scans = scans.assign(build=gpu.SCAN, engine="scan", samples_ns=faster(scans, 2))
        found.append((name, pd.concat([rows.assign(machine="host"), offloaded, scans], ignore_index=True), facts))
    return found


def _offloads(rows):
    return rows["n_gpu_layers"].fillna(0).ne(0).any()


def faster(rows, by):
    return [[[time // by for time in sample] for sample in samples] for samples in rows["samples_ns"]]


def test_a_gpu_is_held_against_its_own_ceilings_and_not_its_host_s(with_a_gpu):
    found = machines.passes([each for each in with_a_gpu if each[0] == gpu.ASYMMETRY])
    (host,) = set(found["chip"]) - {"Board"}
    chips, shares = found.groupby("chip")[["read", "compute"]].max(), found.groupby("chip")["share"].median()
    assert (chips.loc["Board"] / chips.loc[host]).tolist() == pytest.approx([10, 10], rel=0.01)
    assert shares["Board"] == pytest.approx(shares[host], rel=0.01)


def test_a_planted_gpu_is_as_much_faster_as_it_was_planted_and_scored_by_the_forecasts(with_a_gpu):
    (board,) = gpu.boards(with_a_gpu)
    scored = gpu.scored(board).set_index("key")
    scan = scored.loc["prompt of 512, PLaMo 2: gain of a scan on the GPU"]
    assert (scan["measured"].value, scan["claim"]) == (pytest.approx(2.0, rel=0.01), "does not hold")
    step = scored.loc["step of PLaMo 3: gain of the GPU over the CPU"]
    assert (step["measured"].value, step["claim"]) == (pytest.approx(10.0, rel=0.02), "holds")
    prompt, step = board.prompt(gpu.ATTENTION, 512), board.step(gpu.ATTENTION)
    many, one = (board.steps(gpu.ATTENTION, n) for n in (16, 1))
    for key, ratios in (
        ("asymmetry of PLaMo 3: tokens a second of a prompt of 512 over those of a step", 512 * step / prompt),
        ("step of 16 sequences of PLaMo 3 against a step of one", many / one),
    ):
        assert scored.loc[key, "measured"].value == pytest.approx(np.exp(np.log(ratios).median()), rel=1e-6)
    assert scored.loc["step of PLaMo 3: gain of graphs", "claim"] == "inconclusive", "nothing was measured without"


def test_forecasts_are_scored_on_released_models_too(with_a_gpu):
    """Their names bear no star."""

    def of(studies):
        (board,) = gpu.boards(studies)
        return [each.value for each in gpu.scored(board).query("not key.str.startswith('released')").measured]

    released = [(name, rows.assign(model=rows["model"].map(unstarred)), facts) for name, rows, facts in with_a_gpu]
    assert np.isfinite(of(released)).any()
    np.testing.assert_equal(of(released), of(with_a_gpu))


@pytest.fixture(scope="module")
def mac(studies):
    """Of an invented Mac: notebook 01's rows as recorded, and chunks and caches as slow as told: `mac(chunk, cached)`.

    `chunk`: ms of a chunk of so many tokens. `cached`: factor on the deep passes with a cache of this type of keys.
    """
    found = {}
    for name, rows, facts in studies:
        if (
            rows["build"].eq("stock").any()
            and rows["block"].nunique() > found.get(name, (rows.iloc[:0],))[0]["block"].nunique()
        ):
            found[name] = rows, facts

    def planted(chunk, cached, tensor=False):
        invented = []
        for name, recorded in ((gpu.ASYMMETRY,) * 2, (gpu.CHUNKS, "06-chunked"), (gpu.CACHES,) * 2):
            rows, facts = found[recorded]
            rows = rows.assign(machine="host", n_gpu_layers=-1)
            if name == gpu.CHUNKS:
                own = rows[rows["workload"].eq("arrival") & rows["n_seq"].eq(0)].drop_duplicates(["model", "block"])
                rows = pd.concat([own.assign(n_chunk=n) for n in chunked.GPU_SIZES], ignore_index=True)
                evaluated = [len(chunk_calls.calls(metrics.cell_of(row))) for row in rows.to_dict("records")]
                taken = [int(chunk(n) * 1e6) for n in rows["n_chunk"]]
                rows["samples_ns"] = [[[ns] * n] for ns, n in zip(taken, evaluated, strict=True)]
                rows["disturbed"], rows["drift"] = False, 0.0
            if name == gpu.CACHES:
                base = {row.block: row.samples_ns for row in rows.itertuples() if usual_cache(row)}
                rows = rows[rows["block"].isin(list(base))]
                rows["samples_ns"] = [
                    [[int(ns * cached(row.type_k)) for ns in part] for part in base[row.block]]
                    if unstarred(row.model) == gpu.HYBRID and row.workload == "depth" and row.flash_attn == "on"
                    else row.samples_ns
                    for row in rows.itertuples()
                ]
            (host,) = {data["chip"]: data for data in facts.values() if "chip" in data}.values()
            board = {"name": "MTL0", "chip": "invented", "memory_bytes": 1 << 35, "tensor": tensor}
            invented.append((name, rows, facts | {"host": host | {"gpus": [board]}}))
        (board,) = gpu.boards(invented, "MTL")
        return board

    return planted


def usual_cache(row):
    few = row.workload == "depth" and row.label == "few" and unstarred(row.model) == gpu.HYBRID
    return few and (row.flash_attn, row.type_k) == ("on", "f16")


@pytest.mark.whole
def test_chunks_and_caches_of_an_invented_mac_are_scored_by_the_forecasts(mac):
    by_kernel = dict(zip(chunked.GPU_SIZES, gpu.by_kernel(chunked.GPU_SIZES)["ms"], strict=True))
    for chunk, cached, tiles, bytes_alone, nearest in (
        (by_kernel.get, {"f16": 1.0, "q8_0": 1.05, "q4_0": 1.1}.get, "holds", "holds", "ours"),
        (
            lambda n: 3.0 * n,
            {"f16": 1.0, "q8_0": 0.7, "q4_0": 0.5}.get,
            "does not hold",
            "does not hold",
            "proportional",
        ),
    ):
        board = mac(chunk, cached)
        scored = gpu.scored(board).set_index("key")
        told = scored[scored["about"] == "chunks"]
        assert set(told["claim"]) == {tiles}
        assert told["measured"].iloc[2].value == pytest.approx(chunk(33) / chunk(32))
        deep = scored[scored.index.str.contains("cache against F16")]
        assert set(deep["claim"]) == {bytes_alone}
        of_chunks = gpu.scored(board).query("about == 'chunks'")
        missed = gpu.off(of_chunks)
        assert min(missed, key=missed.get) == nearest
    with_tensor_units = gpu.scored(mac(by_kernel.get, lambda kind: 1.0, tensor=True))
    assert not with_tensor_units["tiles"].any(), "tiles of 128 columns are another kernel"
    assert {"chunk of 16 tokens of PLaMo 3 against one of 32"} <= set(with_tensor_units["key"])


def test_gates_of_released_weights_decide_between_a_gpu_and_its_host(mac):
    board = mac(lambda n: 3.0 * n, lambda kind: 1.0)
    one = (
        board.gates[board.gates["model"].map(unstarred) == gpu.HYBRID].iloc[:1].assign(model="plamo-2-1b", dtype="Q8_0")
    )
    wrong = one.assign(checks=[{"prefill_agrees": False}], n_gpu_layers=-1)
    for rows, shares in (((wrong, one.assign(n_gpu_layers=0)), (0.0, 1.0)), ((wrong,), (0.0, None))):
        gates = pd.concat(rows)
        scored = gpu.scored(replace(board, gates=gates)).set_index("key")
        for where, share in zip(("all", "no"), shares, strict=True):
            line = scored.loc[f"released PLaMo 2, {where} layers on the GPU: gates that pass"]
            assert line["claim"] == ("inconclusive" if share is None else "holds")
            assert share is None or line["measured"].value == share


def test_what_metal_computes_by_number_of_columns_meets_the_source_and_grows_by_groups_and_tiles():
    told = gpu.by_kernel(range(1, 513)).set_index("width")
    known = told.dropna(subset=["published"])
    assert list(known.index) == [1, 2, 4, 8, 16, 512]
    assert (known["ms"] / known["published"]).tolist() == pytest.approx([1.0] * 6, rel=0.03)
    assert told.loc[9:32, "ms"].nunique() == 1
    assert told.loc[7, "ms"] == told.loc[8, "ms"] > told.loc[6, "ms"] > told.loc[5, "ms"]
    assert told["each"].idxmin() == 512
    assert set(told.index[told["each"].diff().shift(-1) > 0]) == {5, 6, *range(32, 512, 32)}, "where one more is dearer"


READ = {  # what the forecasts for Metal stand on, as the locked engine has it
    "ggml/src/ggml-metal/ggml-metal-ops.cpp": {2468: "ne11 >= 2 && ne11 <= 8", 2506: "switch (ne11)", 2516: "case 5:",
        2956: "ne01 < 20", 2967: "< 32", 2552: "use_mm"},
    "ggml/src/ggml-metal/ggml-metal-common.cpp": {41: "ne11 > 8"},
    "ggml/src/ggml-metal/ggml-metal-device.cpp": {840: "res.nr1 = NRB", 846: "res.nr1 = 32"},
    "ggml/src/ggml-metal/ggml-metal-device.m": {1285: ": 32;", 1737: "128",
        1751: "src[1]->type != op->src[2]->type"},
    "ggml/src/ggml-metal/kernels/mul_mm.metal": {856: "kernel_mul_mm_bf16_f32", 864: "kernel_mul_mm_q8_0_f32"},
    "ggml/src/ggml-metal/ggml-metal.cpp": {774: "offload_op"},
    "ggml/src/ggml-backend.cpp": {970: "op_offload"},
    "ggml/src/ggml-cpu/repack.cpp": {4974: "GGML_TYPE_Q4_0", 5246: "nullptr"},
    "src/models/plamo2.cpp": {290: "n_seq_tokens, n_seqs"},
    "src/llama-context.cpp": {550: "set to disabled", 3840: "ggml_is_quantized(params.type_v)"},
}  # fmt: skip


def test_the_lines_that_forecasts_name_are_those_of_the_locked_engine():
    try:
        sdist = builds.fetch()
    except StudyError as error:
        pytest.skip(f"pip cannot fetch the sdist here: {error.why}")
    with tarfile.open(sdist) as archive:
        ends = {f"vendor/llama.cpp/{name}": name for name in READ}
        for member in archive:
            if name := ends.pop(member.name.partition("/")[2], ""):
                lines = archive.extractfile(member).read().decode().splitlines()
                for number, said in READ[name].items():
                    assert said in lines[number - 1], f"{name}:{number}"
    assert not ends


def test_an_invented_mac_whose_steps_come_in_groups_and_tiles_is_as_foretold_and_one_without_is_not(with_a_gpu):
    groups = {1: 12.7, 2: 13.5, 3: 18.0, 4: 22.5, 5: 27.0, 6: 36.0, 7: 44.0, 8: 44.0}
    for ms, foretold, nearest in (
        (lambda n: groups.get(n, 40.9), "holds", "ours"),
        (lambda n: 12.7 * n, "does not hold", "proportional"),
    ):
        mac = []
        for name, rows, facts in with_a_gpu:
            steps = rows["workload"].eq("decode") & rows["model"].map(unstarred).eq(gpu.ATTENTION) & rows["n_seq"].gt(0)
            timed = [
                [[int(ms(row.n_seq) * 1e6)] * len(row.samples_ns[0])] if step else row.samples_ns
                for row, step in zip(rows.itertuples(), steps, strict=True)
            ]
            board = {"gpus": [{"name": "MTL0", "chip": "invented", "memory_bytes": 1 << 35}]}
            mac.append((name, rows.assign(samples_ns=timed), facts | {"host": facts["host"] | board}))
        (board,) = gpu.boards(mac, "MTL")
        scored = gpu.scored(board).set_index("key")
        staircase = scored[scored.index.str.startswith("step of 9 ") | scored.index.str.startswith("step of 32 ")]
        assert set(staircase["claim"]) == {foretold}
        missed = gpu.off(gpu.scored(board))
        assert min(missed, key=missed.get) == nearest


# ---------------------------------------------------------------- names, and processes behind a number


def test_a_machine_is_named_by_what_its_fact_says_and_no_more():
    for chip, name in {
        "AMD EPYC (family 25)": "AMD EPYC Zen 3 or 4, 2 vCPUs",
        "AMD EPYC (family 99)": "AMD EPYC (family 99), 2 vCPUs",
        "AMD EPYC 9R14 (family 25)": "AMD EPYC 9R14, 2 cores",
        "Intel(R) Xeon(R) Processor @ 2.90GHz (family 6)": "Intel Xeon @ 2.90GHz, 2 vCPUs",
        "Intel(R) Xeon(R) Platinum 8488C (family 6)": "Intel Xeon Platinum 8488C, 2 cores",
        "aarch64 (family ?)": "aarch64, 2 cores",
        "Apple M4 Pro": "Apple M4 Pro",
        "unknown": "unknown",
    }.items():
        assert processors.machine({"chip": chip, "performance_cores": 2}) == name
    assert processors.cores({"chip": "AMD EPYC (family 26)", "performance_cores": 1}) == "1 vCPU"


def test_a_second_machine_of_one_name_bears_what_differs_its_cache_or_else_a_part_of_its_id():
    chip = {"chip": "Intel(R) Xeon(R) Processor (family 6)", "performance_cores": 2}
    caches = {"a" * 16: 260, "b" * 16: 105, "c" * 16: 260, "d" * 16: 105}
    facts = {name: chip | {"last_level_cache_bytes": size << 20} for name, size in caches.items()}
    names = [processors.machine(fact) for fact in processors.told_apart(facts)[0].values()]
    plain = names[0]
    assert names[1:] == [f"{plain} ({mark})" for mark in ("105 MiB of cache", "cccccccc", "dddddddd")]


def test_recorded_machines_are_told_apart_by_names_that_what_computed_there_supports():
    facts, builds = {}, {}
    for path in sorted((paths.MEASURED / REFERENCE).glob("*.jsonl")):
        records = journal.read(path)
        known = {record.id: record.data for record in records if hasattr(record, "data")}
        for row in journal.latest_rows(records):
            facts[row.machine] = known[row.machine]
            if row.status == "ok" and row.valid and row.engine:
                builds.setdefault(row.machine, set()).add(known[row.engine]["build"])
    for machine, used in processors.USED.items():
        assert any(all(each in build for each in used) for build in builds[machine]), machine
    names = {(fact["chip"], processors.processor(fact)) for fact in facts.values()}
    assert len(names) == len({name for _, name in names}), "one name for two kinds of processors"
