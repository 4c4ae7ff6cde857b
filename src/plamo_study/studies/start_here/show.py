"""The words around the numbers: questions, and answers behind a click."""

from IPython.display import Markdown

from plamo_study.analysis.stats import Estimate
from plamo_study.measure.recording import Recording
from plamo_study.present import sentences
from plamo_study.present.evidence import chips, escaped
from plamo_study.present.sentences import CLOSE
from plamo_study.present.tables import Columns, Table, significant, table
from plamo_study.studies.start_here import analysis


def mystery(phases: Recording) -> Markdown:
    """Two numbers that do not seem to belong together."""
    known = analysis.mystery(phases)
    return Markdown(
        f"**{escaped(known.model)} reads {known.read.value:.0f} tokens a second. It writes {known.write.value:.1f}.** "
        f"The same model, the same two cores, and nearly the same multiplications for every token. Yet reading is "
        f"{known.ratio:.1f} times as fast{sentences.beside(known.ratio, known.read, known.write, '.1f')}.\n\n"
        f"(The star: the file has the size of the released model and random weights; notebook 05 tells what other "
        f"values change. Measured on {chips(phases)}, in several processes: medians, with 95 % intervals in brackets.)"
    )


def answer(question: str, text: str) -> Markdown:
    """An answer that waits behind its question."""
    return Markdown(f"<details><summary>{question}</summary>\n\n{text}\n\n</details>")


def why_calls(phases: Recording) -> Markdown:
    """What a prompt and an answer differ in."""
    known = analysis.mystery(phases)
    prompt = analysis.PROMPT / known.read.value
    return answer(
        "Why can the prompt be read in one go, and the answer not be written in one go?",
        f"All tokens of a prompt are known when it comes, so one call works on all of them. Of an answer only the next "
        f"token can be computed: it depends on the one before. So {analysis.PROMPT} tokens of a prompt take one call "
        f"of {prompt:.1f} s, and {analysis.ANSWER} tokens of an answer take {analysis.ANSWER} calls of "
        f"{1e3 / known.write.value:.0f} ms. The first is called **prefill**, the others **decode**.",
    )


def two_things(phases: Recording) -> Markdown:
    """What a call needs, with this model's and this machine's numbers."""
    needs, step = analysis.token(phases), analysis.mystery(phases).write.per(1e3)
    fetch, multiply = 1e3 * needs.fetching, 1e3 * needs.multiplying
    return answer(
        "Do it for this model: how long does each take for one token?",
        f"Here the weights take 8 bits each, {needs.weights / 1e9:.2f} GB in all, and memory usually gives "
        f"{needs.ceilings.read / 1e9:.0f} GB a second: at least **{fetch:.0f} ms** to fetch them. A token needs "
        f"{needs.flops / 1e9:.2f} billion operations, and the code that multiplies 8-bit weights does "
        f"{needs.ceilings.matmul / 1e9:.0f} billion a second on these cores: at least **{multiply:.0f} ms**. (Both "
        f"rates were measured by programs that only read, or only multiply.) If the "
        f"two overlap fully, a step takes {max(fetch, multiply):.0f} ms; if not at all, {fetch + multiply:.0f} ms. "
        f"Measured: {step:.1f} ms. Either way most of it is waiting for memory. For about "
        f"{fetch / multiply:.0f} tokens in a call both would take equally long. A prompt has far more tokens, so it "
        f"waits for the multiplications: at least {analysis.prompt(phases):.1f} s for {analysis.PROMPT} of them. (That "
        f"is less than {analysis.PROMPT} times {multiply:.0f} ms: the last layer, which names the next token, is "
        f"needed only after the prompt's last token.)",
    )


def longer(phases: Recording, batches: Recording) -> Markdown:
    """How much longer a prompt's call takes than a step, and for how many times the tokens."""
    found = analysis.calls(phases, batches)
    one, prompt = found[found["tokens"] == 1].iloc[0], found[found["what"] == "a prompt"].iloc[0]
    ratio = prompt["seconds"].value / one["seconds"].value
    return answer(
        "Look it up",
        f"{prompt['seconds'].scaled(1e3).value:.0f} ms against {one['seconds'].scaled(1e3).value:.0f} ms: {ratio:.0f} "
        f"times as long, for {prompt['tokens']} times as many tokens.",
    )


def bits(types: Recording, guess: float) -> Markdown:
    """What fewer bits did to each phase, beside the guess."""
    found = analysis.bits(types)
    fewer = found[found["dtype"] == analysis.FEWER_BITS].set_index("phase")
    half = found[found["dtype"] == analysis.TYPES[1]].set_index("phase")["ratio"]
    return answer(
        _asked(guess, "times for writing"),
        f"{analysis.FEWER_BITS} stores a weight in 4 bits, and a scale for every 32 of them, so the file is "
        f"{fewer['smaller'].iloc[0]:.1f} times smaller than F16 with 16 bits. Writing became "
        f"{fewer.loc['writing', 'ratio']:.1f} times as fast. With 8 bits ({analysis.TYPES[1]}) it became "
        f"{half['writing']:.1f} times as fast. So writing follows the bytes. Reading does not: half the bytes made it "
        f"{half['reading']:.2f} times as fast, which is slower, and a third of them "
        f"{fewer.loc['reading', 'ratio']:.2f} times. It waits for the multiplications, and every type is multiplied by "
        f"code of its own. How much of writing's gain comes from that code this experiment cannot say. Notebook 04 "
        f"looks at it.",
    )


def batch(phases: Recording, batches: Recording, guess: float) -> Markdown:
    """What several answers at once give, beside the guess."""
    found = analysis.batch(batches).set_index("n_seq")
    two, many, needs = found.loc[2], found.loc[analysis.TOGETHER], analysis.token(phases)
    n = analysis.TOGETHER
    allowed = n * (needs.fetching + needs.multiplying) / (needs.fetching + n * needs.multiplying)
    below = {"holds": "fewer than", "does not hold": "more than", "inconclusive": "no more, it may be, than"}
    return answer(
        _asked(guess, f"times for {n} answers"),
        f"{n} answers at once give {many['factor']:.1f} times as many tokens a second as one. The weights are "
        f"fetched once for all of them, but each token has its own multiplications. If fetching and multiplying do not "
        f"overlap, that allows {allowed:.1f} times. The rest is lost because the code that multiplies is slow for "
        f"a few tokens. Two answers even give {below[two['factor'].below(1.0)]} one: {two['factor']:.2f} times "
        f"(notebook 03).",
    )


def right(guess: float) -> Markdown:
    """What a server did to several people at once, beside the guess."""
    said = []
    for at_once in (2, 4):
        run = analysis.served(at_once)
        end = "lived" if run.exit is None else "died"
        said.append(
            f"With {at_once} people at once {run.differ} of {run.answers} answers were wrong, and the server {end}."
        )
    fixed = [analysis.served(at_once, "corrected") for at_once in (2, 4)]
    differ, every = sum(run.differ for run in fixed), sum(run.answers for run in fixed)
    return answer(
        _asked(guess, f"right answers of {analysis.served().answers}"),
        f"{' '.join(said)} It is not the server: with our patch to PLaMo 2's code in llama.cpp, the engine inside it, "
        f"{differ} of {every} are wrong. Two prompts that arrive together are computed in one call, and there the "
        f"states of PLaMo 2 get mixed up. Nothing says so. That is why this project prints no speed without proof that "
        f"the computation was right (notebook 03). The model asked here is a small one that was trained for "
        f"this project, so that its answers mean something.",
    )


def _asked(guess: float, what: str) -> str:
    return f"You guessed {guess:g} {what}. What came out?" if guess >= 0 else "What came out?"


def score(types: Recording, batches: Recording, bits: float, together: float, right: float) -> Table | Markdown:
    """The guesses that were made beside what was measured."""
    run, found = analysis.served(), analysis.bits(types)
    fewer = found[(found["dtype"] == analysis.FEWER_BITS) & (found["phase"] == "writing")]["ratio"].iloc[0]
    many = analysis.batch(batches).set_index("n_seq").loc[analysis.TOGETHER]["factor"]
    asked: dict[str, tuple[float, Estimate | float]] = {
        f"writing with {analysis.FEWER_BITS}, times as fast as with F16": (bits, fewer),
        f"{analysis.TOGETHER} answers at once, times as many tokens a second": (together, many),
        f"right answers of {run.answers} asked at once": (right, float(run.answers - run.differ)),
    }
    made = {what: guess for what, guess in asked.items() if guess[0] >= 0}
    if not made:
        return Markdown("No guess was typed. In JupyterLab, put yours into the first cell and run the notebook again.")
    scored = analysis.score(made)
    columns: Columns = {
        "what": ("what", ""),
        "guess": ("your guess", "g"),
        "measured": ("measured", significant(2)),
        "off": ("off by a factor of", ".1f"),
    }
    n = int(scored["close"].sum())
    return table(scored, columns, f"{n} of {len(scored)} guesses are within {CLOSE} times of what was measured.")
