"""Which batches test the batching law, and which architectures are asked which questions.

Batches: random ones to break the law, a map of packed prompts, and an operator's three tests. A seed determines its
grid.
"""

import random
from dataclasses import dataclass, replace
from itertools import groupby

from llama_meter.cells import Answers, Cell, Decode, Hybrid, Isolation, Replay
from llama_meter.errors import StudyError
from llama_meter.measure.plan import MODELS, TIME_LIMIT_S, Plan, change, of_kind, with_gates
from llama_meter.measure.request import NOTHING, Sweep

Calls = list[list[tuple[int, int]]]
BASE = Replay(scale="mini", dtype="F16")
SEEDS_APART = 1_000_000  # a drawn cell's seed: that of its grid times this, plus its number
LENGTHS = (1, 2, 3, 5, 8, 16, 21, 32)
BATCHES = (8, 16, 24, 32, 64, 128)
MOST_STEPS = 6
MAP_PROMPT, MAP_BATCHES, MAP_SEQUENCES = 128, (128, 256, 512, 1024), range(1, 13)
TEST_PROMPTS, TEST_TOKENS = 4, 256  # the batch in which the defects were first seen
TESTS = {  # how the names of the checks end that answer them
    "identity": ("/0", "/1", "/2", "/3"),  # a sequence in a batch equals itself alone
    "isolation": ("isolation_error",),  # a neighbour's prompt does not change your logits
    "bystander": ("/3",),  # a sequence that is not in the step does not change
}


def grid(seed: int, n: int, model: str, control: str) -> tuple[Cell, ...]:
    """`n` replay cells, every fifth on `control`: packed or not, equal or not, slots leaving and joining."""
    drawn = [_configuration(random.Random(f"{seed}/{number}")) for number in range(n)]
    cells = []
    for number, (calls, n_seq, n_batch, n_ubatch) in enumerate(drawn):
        most = max(sum(k for call in calls for s, k in call if s == seq) for seq in range(n_seq))
        name = control if number % 5 == 4 else model
        cell = change(BASE, model=name, calls=_frozen(calls), seed=seed * SEEDS_APART + number)
        cells.append(change(cell, n_tokens=most, n_seq=n_seq, n_batch=n_batch, n_ubatch=n_ubatch))
    return tuple(cells)


def packed_map(model: str) -> tuple[Cell, ...]:
    """Replay cells of 1 to 12 packed prompts at four batch sizes, each followed by one step of all."""
    base, cells = change(BASE, model=model, question="map", n_tokens=MAP_PROMPT + 1), []
    for n_batch in MAP_BATCHES:
        for n_seq in MAP_SEQUENCES:
            calls = [*packed([(seq, MAP_PROMPT) for seq in range(n_seq)], n_batch), [(seq, 1) for seq in range(n_seq)]]
            cells.append(change(base, calls=_frozen(calls), n_seq=n_seq, n_batch=n_batch))
    return tuple(cells)


def three_tests(model: str) -> tuple[Cell, ...]:
    """The cells that answer the `TESTS` for an embedded model: four packed prompts, or a step of two slots.

    The bystander is slot 3: slots 1 and 2 step once, then 3 is asked for its next token.
    """
    prompts = tuple((seq, TEST_TOKENS) for seq in range(TEST_PROMPTS))
    base = change(BASE, model=model, calls=(prompts,), n_tokens=TEST_TOKENS + 1, n_seq=TEST_PROMPTS)
    isolation = of_kind(Isolation, base, question="isolation", repetitions=2)
    calls = (*((prompt,) for prompt in prompts), ((1, 1), (2, 1)), ((3, 1),))
    return change(base, question="identity"), isolation, change(base, calls=calls, question="bystander")


def _frozen(calls: Calls) -> tuple[tuple[tuple[int, int], ...], ...]:
    return tuple(tuple(call) for call in calls)


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
    stream = [seq for seq, length in prompts for _ in range(length)]
    cuts = [stream[at : at + n_batch] for at in range(0, len(stream), n_batch)]
    return [[(seq, len(list(tokens))) for seq, tokens in groupby(cut)] for cut in cuts]


NEEDED = 15  # configurations of a grid that any finding requires
LAW_SEEDS, LAW_CELLS = (0, 1, 2), 60  # configurations of each
PROMPTS, ANSWER = 32, 32  # of a process; tokens of an answer
SEEDS = range(8)  # of prompts: 256 distinct ones a load
SLOTS = 16
# Users at once and tokens of their prompts. Two ask as chapter 9's users do. The prompts of sixteen fill one
# micro-batch, which the released engine survives if all are equally long.
LOADS = ((2, 128), (16, 32))


def batching_law(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Configurations from each seed for the batching law, PLaMo 3 as control, one process each, on the CPU.

    Also the map of packed prompts by number and batch size, and the operator's three tests. The law depends only on
    the shape of calls, so the embedded models suffice, whatever the scale. `sweep`: other seeds.
    """
    if sweep.files:
        raise StudyError("files", "the law is held against the embedded models", "give -p seed, for fresh draws")
    tests = [cell for model in MODELS for cell in three_tests(model)]
    grids = (grid(seed, LAW_CELLS, *MODELS) for seed in sweep.seed or LAW_SEEDS)
    drawn = [cell for of_seeds in zip(*grids, strict=True) for cell in of_seeds]
    cells = (*tests, *drawn[:NEEDED], *packed_map(MODELS[0]), *drawn[NEEDED:])
    anchor = Decode(model=MODELS[0], scale="mini", dtype="F16", depth=16, n_gen=32)
    planned = Plan("04-batching-law", "mini", cells, (), anchor, 1, 0, TIME_LIMIT_S["mini"])
    return replace(planned, compared=cells, needed=len(tests) + NEEDED)


def answers(scale: str, gpu: bool = False) -> Plan:
    """Whole answers to 256 distinct prompts, alone and beside others, for the share of prompts that company changes.

    Both numbers of users with prompts of one length and of drawn ones. PLaMo 3 is the control. At mini whatever the
    scale: answers of random weights mean nothing.
    """
    base = Answers(scale="mini", dtype="F16", n_gen=ANSWER, n_seq=SLOTS, n_requests=PROMPTS)
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


# ------------------------------------------------------------------ small random files of every architecture

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
CONTROLS = ("llama-dense", "llama-moe", "plamo3-dense")  # attention alone
GENERATOR = "architectures"  # the build that writes the files
LAYERED = "three layers"  # a form that all are also written in, except
IN_ONE_FORM = "bailingmoe3-moe"
PLAIN = "plain"  # whole, and readable by older builds: without the generator's tokenizer and tensors that came later
STATE_FIRST = "state first"  # as plain, but the first layer is recurrent, and the number of heads one for all layers
N_CTX = 128  # tokens of a slot
EQUAL, UNEQUAL = (24, 24, 24), (24, 17, 9)  # tokens of prompts
ROLLBACK = 8  # tokens whose states a context keeps where some are taken back
DRAFTS = (1, 2, 3, 4)  # tokens of a draft
LISTED = "by layer"
TIMES = 30.0  # tolerance: so many times the rounding of the sequence alone, but at least
LEAST, LEAST_ON_GPU = 5e-4, 2e-3  # kernels at 17 slots: up to 2e-4


@dataclass(frozen=True)
class Question:
    """A question in the words of a table's head; what it does stands in `hybrids.RULES`.

    `lengths`: tokens of each prompt; empty: as many short prompts as the number says. `numbers`: what it counts, if
    anything. `shared`: all sequences begin with the first one's prompt.
    """

    words: str
    lengths: tuple[int, ...]
    numbers: tuple[int, ...] = (0,)
    shared: bool = False


QUESTIONS = {
    "equal": Question("equal prompts in one call", EQUAL),
    "unequal": Question("unequal prompts in one call", UNEQUAL),
    "steps": Question("steps together", UNEQUAL),
    "late": Question("a prompt beside steps", UNEQUAL),
    "left": Question("one leaves, another comes", (*UNEQUAL, 12)),
    "gaps": Question("slots with gaps", UNEQUAL),
    "slots": Question("so many slots", (), tuple(range(1, 18))),
    "cut": Question("a prompt cut", (24,), (1, 2, 3, 5, 8, 16)),
    "moved": Question("state to another slot", (24,)),
    "resized": Question("state to another number of slots", (24,)),
    "copied": Question("a prompt shared by copies", EQUAL, shared=True),
    "kept": Question("a draft taken back, states kept", (24,), DRAFTS),
    "kept apart": Question("a draft taken back token by token", (24,), DRAFTS),
    "kept beside": Question("drafts of several slots", UNEQUAL, DRAFTS),
    "kept copied": Question("a draft taken back, then copied", EQUAL, DRAFTS, shared=True),
}
ABOUT_FILES = {LISTED: Question("head counts by layer", (24,))}  # about a file itself: nobody shares anything


def short(name: str) -> str:
    """An architecture as tables and charts name it; a model that is none keeps its name."""
    return "llama MoE" if name == "llama-moe" else name.replace("-dense", "").replace("-moe", "")


def tolerance(rounding: float, gpu: bool = False) -> float:
    """Largest relative error of logits that rounding explains.

    On a GPU: CUDA multiplies 4 to 16 columns in TF32, whose mantissa is as short as that of F16 (ggml-cuda/mmf.cu).
    """
    return max(LEAST_ON_GPU if gpu else LEAST, TIMES * rounding)


def hybrids(scale: str, gpu: bool = False) -> Plan:
    """Each question with each of its numbers; with the middle one also a planted fault, and files of three layers.

    At mini whatever the scale: the files are small and random.
    """
    base = Hybrid(dtype="F32", n_gpu_layers=-1 if gpu else 0)
    needed: list[Hybrid] = []
    others: list[Hybrid] = []
    for name, question in QUESTIONS.items():
        middle = question.numbers[(len(question.numbers) - 1) // 2]
        for model in (*RECURRENT, *CONTROLS):
            cell = change(base, model=model, question=name)
            needed += [change(cell, number=number) for number in question.numbers]
            others.append(change(cell, number=middle, planted=True))
            if model != IN_ONE_FORM:
                others.append(change(cell, number=middle, form=LAYERED))
    cells = (*needed, *others)
    planned = Plan("04-hybrids", "mini", cells, (), None, 1, 0, TIME_LIMIT_S["mini"], grows=False, program=GENERATOR)
    workload = "plamo_study.studies.right_answers.hybrids"
    return replace(planned, compared=cells, needed=len(needed), workload=workload)
