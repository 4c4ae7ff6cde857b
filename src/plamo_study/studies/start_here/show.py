"""The words around the numbers: questions, and answers behind a click."""

from IPython.display import Markdown

from plamo_study.measure.recording import Recording
from plamo_study.present.evidence import chips, escaped
from plamo_study.present.sentences import CLOSE
from plamo_study.present.tables import Columns, Table, significant, table
from plamo_study.studies.start_here import analysis


def mystery(phases: Recording) -> Markdown:
    """Two numbers that do not seem to belong together."""
    known = analysis.mystery(phases)
    return Markdown(
        f"**{escaped(known.model)} reads {known.read.value:.0f} tokens a second. It writes {known.write.value:.1f}.** "
        f"The same model, the same two cores, and the same multiplications for every token. Yet reading is "
        f"{known.ratio:.1f} times as fast.\n\n({chips(phases)}; medians over processes, brackets are 95 % intervals)"
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
    return answer(
        "Do it for this model: how long does each take for one token?",
        f"The weights are {needs.weights / 1e9:.2f} GB, and memory gives {needs.ceilings.read / 1e9:.0f} GB a second: "
        f"**{1e3 * needs.fetching:.0f} ms** to fetch them. A token needs {needs.flops / 1e9:.2f} billion "
        f"operations, and the cores do {needs.ceilings.matmul / 1e9:.0f} billion a second: "
        f"**{1e3 * needs.multiplying:.0f} ms** to multiply. A decode step was measured at {step:.1f} ms. It waits for "
        f"memory. Both times are equal at {needs.fetching / needs.multiplying:.0f} tokens in a call; a prompt has "
        f"more, so it waits for the multiplications.",
    )


def bits(types: Recording, guess: float) -> Markdown:
    """What fewer bits did to each phase, beside the guess."""
    found = analysis.bits(types)
    fewer = found[found["dtype"] == analysis.FEWER_BITS].set_index("phase")
    write, read = fewer.loc["writing", "ratio"], fewer.loc["reading", "ratio"]
    other = found[(found["dtype"] == analysis.TYPES[1]) & (found["phase"] == "reading")]["ratio"].iloc[0]
    return answer(
        f"You guessed {guess:g} times for writing. What came out?",
        f"With {analysis.FEWER_BITS} the weights are {fewer['smaller'].iloc[0]:.1f} times smaller. Writing became "
        f"{write:.1f} times as fast, reading {read:.2f} times. The multiplications are as many as before, so what the "
        f"fewer bytes sped up was waiting for bytes. Reading changes only because every type is multiplied by code of "
        f"its own: with {analysis.TYPES[1]}, half the bytes, it becomes {other:.2f} times as fast, slower than before. "
        f"This is the experiment that tells the two apart.",
    )


def batch(batches: Recording, guess: float) -> Markdown:
    """What several answers at once give, beside the guess."""
    found = analysis.batch(batches).set_index("n_seq")
    two, many = found.loc[2], found.loc[analysis.TOGETHER]
    below = {"holds": "fewer than", "does not hold": "more than", "inconclusive": "no more, it may be, than"}
    return answer(
        f"You guessed {guess:g} times for {analysis.TOGETHER} answers. What came out?",
        f"{analysis.TOGETHER} answers at once give {many['factor']:.1f} times as many tokens a second as one. The "
        f"weights are fetched once for all of them. It is not {analysis.TOGETHER} times, because each token has its "
        f"own multiplications. And two answers give {below[two['factor'].below(1.0)]} one: {two['factor']:.2f} times, "
        f"because llama.cpp changes to another kernel there (notebook 03).",
    )


def right(guess: float) -> Markdown:
    """What a server did to two people, beside the guess."""
    run = analysis.served()
    end = "then lived" if run.exit is None else f"then died in round {run.rounds_done + 1}"
    return answer(
        f"You guessed that {guess:g} of {run.answers} answers were right. What came out?",
        f"{run.answers - run.differ} of {run.answers} were what each person gets alone, and the server {end}. "
        f"llama.cpp mixes up PLaMo 2's sequences when their prompts share a call, and nothing says so. So this project "
        f"prints no speed without a verdict (notebook 03).",
    )


def score(
    phases: Recording, types: Recording, batches: Recording, times: float, bits: float, together: float, right: float
) -> Table:
    """All guesses beside what was measured."""
    run, found = analysis.served(), analysis.bits(types)
    fewer = found[(found["dtype"] == analysis.FEWER_BITS) & (found["phase"] == "writing")]["ratio"].iloc[0]
    many = analysis.batch(batches).set_index("n_seq").loc[analysis.TOGETHER]["factor"]
    scored = analysis.score(
        {
            "reading, times as fast as writing": (times, analysis.mystery(phases).ratio),
            f"writing with {analysis.FEWER_BITS}, times as fast as with F16": (bits, fewer),
            f"{analysis.TOGETHER} answers at once, times as many tokens a second": (together, many),
            f"right answers of {run.answers} asked at once": (right, float(run.answers - run.differ)),
        }
    )
    columns: Columns = {
        "what": ("what", ""),
        "guess": ("your guess", "g"),
        "measured": ("measured", significant(2)),
        "off": ("off by a factor of", ".1f"),
    }
    n = int(scored["close"].sum())
    return table(scored, columns, f"{n} of {len(scored)} guesses are within {CLOSE} times of what was measured.")
