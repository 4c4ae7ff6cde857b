"""What a machine's page advises, from small frames made by hand."""

import pandas as pd
import pytest

from plamo_study.studies.your_machine import decision
from plamo_study.studies.your_machine.decision import Decision, Request

SHAPE = {
    "arch": "llama",
    "hidden": 256,
    "layers": 8,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 64,
    "vocab": 1000,
    "window": 0,
    "window_pattern": 0,
    "mamba_heads": 0,
    "mamba_head_dim": 0,
    "d_state": 0,
    "d_conv": 0,
    "context_length": 8192,
}
LOSS = {"q4": 20.0, "q8": 1.0}
REQUEST = Request(1000, 200, users=4)


def fact(dtype, shape=(), **more):
    """The fact of a file."""
    return {"name": "m", "scale": "file", "dtype": dtype, "shape": {**SHAPE, **dict(shape)}, "tensors": {}, **more}


def frame(files, batch=(), blocks=3, disturbed=(), few=()):
    """A frame and its rows: `files` (type: seconds a read token, seconds a step), `batch` (type, n: seconds a step).

    `disturbed`: (type, sequences) whose lines are marked; `few`: types of one process less.
    """
    lines = []
    for dtype, (reads, writes) in files.items():
        steps = {1: writes} | {n: step for (of, n), step in dict(batch).items() if of == dtype}
        for block in range(blocks - (dtype in few)):
            swayed = 1 + 0.01 * block
            of = {"file": f"m {dtype}", "model": "m", "dtype": dtype, "block": block, "depth": 128, "n_gen": 16}
            lines.append(of | {"metric": "prefill", "n_prompt": 512, "n_seq": 1, "value": 512 * reads * swayed})
            of |= {"metric": "step", "n_prompt": 0}
            lines += [of | {"n_seq": n, "value": step * swayed} for n, step in steps.items()]
    m = pd.DataFrame(lines).assign(machine="here", n_threads=2, usable=True, drift=0.0, verdict="valid")
    m["disturbed"] = [(dtype, n) in disturbed for dtype, n in zip(m.dtype, m.n_seq, strict=True)]
    return m.assign(key=[str(n) for n in range(len(m))])


def decided(m, safe=True, request=REQUEST, gpu=False, facts=None, **row):
    """The plan of the one model of a frame."""
    rows = m[["key", "n_threads"]].assign(
        **{"n_gpu_layers": 0, "flash_attn": "auto", "type_k": "f16", "type_v": "f16"} | row
    )
    facts = facts or {file: fact(file.split()[1]) for file in m.file.unique()}
    return Decision(m, rows, facts, request, {"llama": safe}, "llama-cpp-python 1.2", gpu).plan("m")


@pytest.fixture(autouse=True)
def losses(monkeypatch):
    """What the types lose, without the reference's rows."""
    known = {f"m {dtype}": lost for dtype, lost in LOSS.items()}
    monkeypatch.setattr(decision, "losses", lambda facts: known)


TOLD, ALIKE = {"q4": (0.01, 0.05), "q8": (0.02, 0.10)}, {"q4": (0.01, 0.05), "q8": (0.0101, 0.0505)}


@pytest.mark.parametrize(
    ("files", "more", "run", "sure"),
    [
        (TOLD, {}, "m.file.q4.gguf", "q8 takes 2.00 [2.00, 2.00] times as long as q4."),
        (ALIKE, {}, "m.file.q8.gguf", "q8 takes 1.01"),
        ({"unknown": (0.01, 0.05), "q8": (0.0101, 0.0505)}, {}, "m.file.unknown.gguf", "q8 takes 1.01"),
        (TOLD, {"few": ("q8",)}, "m.file.q4.gguf", "not ranked: q8 (fewer than 3 quiet processes)."),
        (TOLD, {"few": ("q4", "q8")}, "", "not yet: not ranked: q4 and q8 (fewer than 3 quiet processes)."),
        (TOLD, {"disturbed": (("q4", 1),)}, "m.file.q8.gguf", "not ranked: q4 (disturbed)."),
        ({"q4": TOLD["q4"]}, {}, "m.file.q4.gguf", "one type was measured"),
    ],
)
def test_a_file_is_run_where_enough_quiet_processes_tell(files, more, run, sure):
    plan = decided(frame(files, **more))
    assert run in plan.run
    assert bool(run) == bool(plan.run)
    assert sure in plan.sure
    assert "not told apart" not in plan.sure
    assert plan.disturbed == (not run and "disturbed" in more)


BATCH = {("q4", 4): 0.1, ("q4", 8): 0.15}


@pytest.mark.parametrize(
    ("safe", "users", "disturbed", "n"),
    [(True, 8, (), 8), (True, 4, (), 4), (None, 8, (), 1), (False, 8, (), 1), (True, 8, (("q4", 8),), 4)],
)
def test_slots_are_those_that_users_may_share_and_quiet_rows_show(safe, users, disturbed, n):
    plan = decided(frame({"q4": (0.001, 0.05)}, BATCH, disturbed=disturbed), safe, Request(100, 200, users))
    assert f"-np {n} -c {n * 1024} -t 2" in plan.run
    assert ("Keep `-np 1`" in plan.warning) == (not safe)
    assert ("probe" in plan.warning) == (safe is None)
    assert "llama-cpp-python 1.2" in plan.warning or safe
    assert ("times the requests in the same time" in plan.sure) == (n > 1)


def test_users_who_queue_are_told_both_waits():
    plan = decided(frame({"q4": (0.001, 0.05)}, BATCH), request=Request(100, 200, users=4))
    alone, together = (0.1 + 10) * 1.01, 4 * (0.1 + 200 * 0.1 / 4) * 1.01
    said = f"each waits {together:.1f} s, and in turn {2.5 * alone:.1f} s on average, the last {4 * alone:.1f} s"
    assert said in plan.does
    assert "for the first user" in plan.does
    one = decided(frame({"q4": (0.001, 0.05)}, BATCH), safe=False, request=Request(100, 200, users=4))
    assert f"they are answered in turn and wait {2.5 * alone:.1f} s on average" in one.does


def test_a_window_and_the_types_of_a_cache_bound_what_a_slot_takes():
    own = {"window": 256, "window_pattern": 4}
    facts = {"m q4": fact("q4", own)}
    plan = decided(frame({"q4": (0.01, 0.05)}), facts=facts, type_k="q8_0", type_v="q8_0", flash_attn="on")
    cells = 2 * 2048 + 6 * 768  # two layers keep all, six the window and a micro-batch
    assert f"a slot of 2,048 tokens takes {cells * 2 * 64 * 2 * 34 / 32 / 1e6:.1f} MB." in plan.context
    assert plan.run.endswith("-c 2048 -t 2 -fa on -ctk q8_0 -ctv q8_0")
    assert "Reading was measured up to 512 tokens." in plan.context


@pytest.mark.parametrize(
    ("prompt", "known", "room", "fits"),
    [
        (761, 8192, 2048, True),
        (760, 1000, 1000, False),
    ],
)
def test_a_slot_has_room_for_a_template_within_what_the_model_knows(prompt, known, room, fits):
    facts = {"m q4": fact("q4", {"context_length": known})}
    plan = decided(frame({"q4": (0.01, 0.05)}), request=Request(prompt, 200), facts=facts)
    assert f"-c {room} " in plan.run
    assert ("does not fit" in plan.context) == (not fits)


def test_a_smaller_file_is_advised_only_where_none_was_shown_not_to_help():
    def smaller(ratio):
        m = frame({"q8": (1, 1), "q4": (1, ratio)}).query("metric == 'step'").assign(all="")
        return decision.compare(m, of="dtype == 'q8'", to="dtype == 'q4'", by="all").assign(dtype="q4")

    none = pd.DataFrame(columns=["dtype", "estimate"])
    assert "a smaller file should help" in decision.limit(0.8, 2e10, False, none)
    assert "a smaller file helps (q4)" in decision.limit(0.8, 2e10, False, smaller(0.5))
    for said in (
        decision.limit(0.8, 2e10, False, smaller(1.0)),
        decision.limit(0.8, 2e10, True, none),
        decision.limit(0.4, 2e10, False, none),
    ):
        assert "a smaller file" not in said
