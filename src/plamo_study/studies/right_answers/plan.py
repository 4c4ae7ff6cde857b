"""Which batches test the batching law, and which architectures are asked which questions.

Batches: random ones to break the law, a map of packed prompts, and an operator's three tests. A seed determines its
grid.
"""

import random
from dataclasses import replace

from llama_meter.cells import Answers, Cell, Decode, Hybrid, Isolation, Replay
from llama_meter.errors import StudyError
from llama_meter.measure.plan import MODELS, TIME_LIMIT_S, Plan, change, with_gates
from llama_meter.measure.request import NOTHING, Sweep
from plamo_study.studies.right_answers import architectures
from plamo_study.studies.right_answers.architectures import QUESTIONS

Calls = list[list[tuple[int, int]]]
SEEDS_APART = 1_000_000  # a drawn cell's seed: that of its grid times this, plus its number
LENGTHS = (1, 2, 3, 5, 8, 16, 21, 32)
BATCHES = (8, 16, 24, 32, 64, 128)
MOST_STEPS = 6
MAP_PROMPT, MAP_BATCHES, MAP_SEQUENCES = 128, (128, 256, 512, 1024), range(1, 13)
TEST_PROMPTS, TEST_TOKENS = 4, 256  # the batch in which the defects were first seen
TESTS = {
    "identity": "a sequence in a batch equals itself alone",
    "isolation": "a neighbour's prompt does not change your logits",
    "bystander": "a sequence that is not in the step does not change",
}


def grid(seed: int, n: int, model: str, control: str) -> tuple[Cell, ...]:
    """`n` replay cells, every fifth on `control`: packed or not, equal or not, slots leaving and joining."""
    drawn = [_configuration(random.Random(f"{seed}/{number}")) for number in range(n)]
    cells = []
    for number, (calls, n_seq, n_batch, n_ubatch) in enumerate(drawn):
        frozen = tuple(tuple(call) for call in calls)
        most = max(sum(k for call in calls for s, k in call if s == seq) for seq in range(n_seq))
        name = control if number % 5 == 4 else model
        cell = Replay(model=name, scale="mini", dtype="F16", calls=frozen, seed=seed * SEEDS_APART + number)
        cells.append(change(cell, n_tokens=most, n_seq=n_seq, n_batch=n_batch, n_ubatch=n_ubatch))
    return tuple(cells)


def packed_map(model: str) -> tuple[Cell, ...]:
    """Replay cells of 1 to 12 packed prompts at four batch sizes, each followed by one step of all."""
    cells = []
    for n_batch in MAP_BATCHES:
        for n_seq in MAP_SEQUENCES:
            calls = [*packed([(seq, MAP_PROMPT) for seq in range(n_seq)], n_batch), [(seq, 1) for seq in range(n_seq)]]
            cell = Replay(model=model, scale="mini", dtype="F16", question="map", n_tokens=MAP_PROMPT + 1)
            cells.append(change(cell, calls=tuple(tuple(call) for call in calls), n_seq=n_seq, n_batch=n_batch))
    return tuple(cells)


def three_tests(test: str, model: str) -> Cell:
    """The cell that answers one of `TESTS` for an embedded model: four packed prompts, or a step of two slots.

    The bystander is slot 3: slots 1 and 2 step once, then 3 is asked for its next token.
    """
    packed = (tuple((seq, TEST_TOKENS) for seq in range(TEST_PROMPTS)),)
    alone = tuple(((seq, TEST_TOKENS),) for seq in range(TEST_PROMPTS))
    calls = (*alone, ((1, 1), (2, 1)), ((3, 1),)) if test == "bystander" else packed
    kind = Isolation if test == "isolation" else Replay
    return kind(
        model=model,
        scale="mini",
        dtype="F16",
        n_tokens=TEST_TOKENS + 1,
        n_seq=TEST_PROMPTS,
        calls=calls,
        question=test,
        repetitions=2 if test == "isolation" else 1,
    )


def _configuration(rng: random.Random) -> tuple[Calls, int, int, int]:
    n_batch = rng.choice(BATCHES)
    n_ubatch = rng.choice([size for size in BATCHES if size <= n_batch])
    n_seq = rng.randint(1, 8)
    n_used = rng.randint(1, n_seq)
    lengths = [rng.choice(LENGTHS)] * n_used if rng.random() < 0.5 else rng.choices(LENGTHS, k=n_used)
    prompts = list(enumerate(lengths))
    if rng.random() < 0.3:
        rng.shuffle(prompts)
    calls = packed(prompts, n_batch) if rng.random() < 0.4 else [c for p in prompts for c in packed([p], n_batch)]
    present = {seq for seq, _ in prompts}
    for _ in range(rng.randint(1, MOST_STEPS)):
        calls += _next_calls(rng, present, n_seq, n_batch)
    return [*calls, *([(seq, 1)] for seq in sorted(present))], n_seq, n_batch, n_ubatch


def _next_calls(rng: random.Random, present: set[int], n_seq: int, n_batch: int) -> Calls:
    """A decode step of all or some slots, a sequence leaving, or one joining with a prompt, alone or amid a step."""
    kind, absent = rng.random(), sorted(set(range(n_seq)) - present)
    slots = sorted(present) if rng.random() < 0.5 else sorted(rng.sample(sorted(present), rng.randint(1, len(present))))
    step = [(seq, 1) for seq in slots]
    if kind < 0.15 and len(present) > 1:
        seq = rng.choice(sorted(present))
        present.remove(seq)
        return [[(seq, 0)]]
    if kind < 0.35 and absent:
        seq = rng.choice(absent)
        present.add(seq)
        prompt = [(seq, rng.choice(LENGTHS))]
        return packed(step + prompt if rng.random() < 0.5 else prompt, n_batch)
    return [step[:n_batch]]


def packed(prompts: list[tuple[int, int]], n_batch: int) -> Calls:
    """Prompts as one stream, cut every `n_batch` tokens."""
    calls: Calls = [[]]
    for seq, length in prompts:
        while length:
            room = n_batch - sum(n for _, n in calls[-1])
            if not room:
                calls.append([])
                continue
            taken = min(length, room)
            calls[-1].append((seq, taken))
            length -= taken
    return calls


NEEDED = 15  # configurations of a grid that any finding requires
LAW_SEEDS, LAW_CELLS = (0, 1, 2), 60  # configurations of each
ASKED, ANSWER = 32, 32  # prompts of a process, tokens of an answer
SEEDS = range(8)  # of prompts: 256 distinct ones a load
SLOTS = 16
# Users at once and tokens of their prompts. Two ask as chapter 9's users do. The prompts of sixteen fill one
# micro-batch, which the released engine survives if all are equally long.
LOADS = ((2, 128), (16, 32))


def batching_law(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Configurations from each seed for the batching law, PLaMo 3 as control, one process each, on the CPU.

    Also the map of packed prompts by number and batch size, and the operator's three tests. The law depends only on
    the shape of calls, so the embedded models suffice. `sweep`: other seeds.
    """
    if sweep.files:
        raise StudyError("files", "the law is held against the embedded models", "give -p seed, for fresh draws")
    if scale != "mini":
        raise StudyError(f"scale {scale!r}", "the law is held against the engine at mini", "choose --scale mini")
    tests = [three_tests(test, model) for test in TESTS for model in MODELS]
    grids = (grid(seed, LAW_CELLS, *MODELS) for seed in sweep.seed or LAW_SEEDS)
    drawn = [cell for of_seeds in zip(*grids, strict=True) for cell in of_seeds]
    cells = (*tests, *drawn[:NEEDED], *packed_map(MODELS[0]), *drawn[NEEDED:])
    anchor = Decode(model=MODELS[0], scale="mini", dtype="F16", depth=16, n_gen=32)
    planned = Plan("04-batching-law", "mini", cells, (), anchor, 1, 0, TIME_LIMIT_S["mini"])
    return replace(planned, compared=cells, needed=len(tests) + NEEDED)


def answers(scale: str, gpu: bool = False) -> Plan:
    """Whole answers to 256 distinct prompts, alone and beside others, for the share of prompts that company changes.

    Both numbers of users with prompts of one length and of drawn ones. PLaMo 3 is the control.
    """
    if scale != "mini":
        raise StudyError(f"scale {scale!r}", "answers of random weights mean nothing", "choose --scale mini")
    base = Answers(scale="mini", dtype="F16", n_gen=ANSWER, n_seq=SLOTS, n_requests=ASKED)
    cells = tuple(
        change(base, model=model, n_clients=users, n_prompt=tokens, lengths=lengths, seed=seed)
        for seed in SEEDS
        for users, tokens in LOADS
        for lengths in ("", "drawn")
        for model in MODELS
    )
    planned = with_gates("04-answers", "mini", cells, exact_cache=False)
    compared = tuple(cell for cell in cells if cell.model == MODELS[0])
    planned = replace(planned, anchor=None, blocks=1, extra_blocks=0, grows=False, compared=compared)
    return replace(planned, workload="plamo_study.studies.right_answers.work")


RECURRENT = (  # every one that the generator of the locked engine writes
    "bailingmoe3-moe",
    "falcon-h1-dense",
    "glm5-next-moe",
    "granitehybrid-dense",
    "jamba-dense",
    "kimi-k3-moe",
    "kimi-linear-moe",
    "lfm2-dense",
    "lfm2moe-moe",
    "mamba-dense",
    "mamba2-dense",
    "minimax-01-moe",
    "nemotron_h-dense",
    "nemotron_h_moe-dense",
    "plamo2-dense",
    "qwen35-dense",
    "qwen35moe-moe",
    "qwen3next-moe",
    "qwen4exp-moe",
    "rwkv6-dense",
)
ONE_KIND = ("falcon-h1-dense", "mamba-dense", "mamba2-dense", "rwkv6-dense")  # of layer, in all their layers
FOUR = ("falcon", "granite", "jamba", "lfm2", "mamba", "minimax", "nemotron", "plamo2")
CONTROLS = ("llama-dense", "llama-moe", "plamo3-dense")  # attention alone
UNWRITTEN = ("rwkv6qwen2-dense", "rwkv7-dense", "arwkv7-dense")  # asked too: the row says why there is no file
OTHER_TYPES = ("F16", "Q8_0")  # of all weights
KEEP = (  # those that keep states in the engine as released; our build `rollback` adds PLaMo 2
    "bailingmoe3-moe",
    "glm5-next-moe",
    "kimi-k3-moe",
    "lfm2-dense",
    "lfm2moe-moe",
    "nemotron_h-dense",
    "nemotron_h_moe-dense",
    "qwen35-dense",
    "qwen35moe-moe",
    "qwen4exp-moe",
)
LONGER = 32  # columns from which BLAS is handed a product
FIRST = ("unequal", "late", "copied", "kept", "moved")  # in their order: a software GPU is slow
SOFTWARE_LIMIT_S = 1800.0  # there, the first process to meet a kernel compiles it: minutes
SHAPES = {
    "three layers": {*RECURRENT, *CONTROLS} - {"bailingmoe3-moe"},
    "four heads": {*CONTROLS} | {name for name in RECURRENT if name.startswith(FOUR)},
}  # the files that the generator can write


def hybrids(scale: str, gpu: bool = False) -> Plan:
    """Each question with each of its numbers; with the middle one also a planted fault, other types, two shapes.

    StudyError for a scale other than mini: the files are small whatever the scale.
    """
    if scale != "mini":
        raise StudyError(f"scale {scale!r}", "these files are small and random", "choose --scale mini")
    base = Hybrid(dtype="F32", n_gpu_layers=-1 if gpu else 0)
    asked: list[Cell] = []
    others: list[Cell] = []
    for name, question in QUESTIONS.items():
        middle = question.numbers[(len(question.numbers) - 1) // 2]
        for model in (*RECURRENT, *CONTROLS):
            of = change(base, model=model, question=name)
            asked += [change(of, number=number) for number in question.numbers]
            one = change(of, number=middle)
            others += [change(one, planted=True), *(change(one, dtype=dtype) for dtype in OTHER_TYPES)]
            others += [change(one, form=form) for form, written in SHAPES.items() if model in written]
    asked += [change(base, model=model, question="steps") for model in UNWRITTEN]
    cells = (*asked, *others)
    mended = tuple(cell for cell in cells if isinstance(cell, Hybrid) and _is_mended(cell))
    return Plan(
        "04-hybrids",
        "mini",
        cells,
        (),
        None,
        1,
        0,
        TIME_LIMIT_S["mini"],
        compared=mended,
        needed=len(asked),
        workload="plamo_study.studies.right_answers.hybrids",
        program=architectures.NAME,
        grows=False,
    )


def elsewhere(scale: str, gpu: bool = False) -> Plan:
    """Each question with its middle number, plainly and with a planted fault: for other backends than the CPU's own.

    Prompts are longer on a CPU, so that BLAS is handed their products too. StudyError for a scale other than mini.
    """
    usual = hybrids(scale, gpu)
    one = [cell for cell in usual.cells if isinstance(cell, Hybrid) and cell.planted]
    cells: list[Cell] = []
    for name in dict.fromkeys((*FIRST, *QUESTIONS)):
        of = [change(cell, longer=0 if gpu else LONGER) for cell in one if cell.question == name]
        cells += [change(cell, planted=planted) for planted in (False, True) for cell in of]
    limit_s, needed = SOFTWARE_LIMIT_S if gpu else usual.time_limit_s, len(RECURRENT) + len(CONTROLS)
    return replace(
        usual, study="04-elsewhere", cells=tuple(cells), time_limit_s=limit_s, compared=tuple(cells), needed=needed
    )


def _is_mended(cell: Hybrid) -> bool:
    """Whether the build `recurrent` is asked the same: where it should answer otherwise, or could break something."""
    reserves = cell.model in ("kimi-linear-moe", "minimax-01-moe") and cell.question in ("slots", "resized")
    return not cell.planted and cell.dtype == "F32" and (reserves or cell.question.startswith("kept"))
