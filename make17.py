"""Write notebooks/17-builds.ipynb."""
import nbformat
from nbformat.v4 import new_code_cell as code, new_markdown_cell as md, new_notebook
cells=[md("# Which build of llama.cpp is right, and how fast is each?")]
c=code('''source: str = "recorded"  # recorded: rows of the reference machine, at once; live: ask the engine in use here
scale: str = "shape"  # of the files that are timed; the questions are asked of small files, whatever the scale
minutes: float = 0  # live: within so many minutes; 0: as long as it takes, two minutes on two cores
device: str = "auto"  # live: cpu, gpu, or auto: a GPU where there is one, and its host's CPU; recorded: no effect''')
c.metadata={"tags":["parameters"]}; cells.append(c)
cells.append(code('''import altair as alt
import pandas as pd

from llama_meter.cells import ROTATION
from llama_meter.workloads.architectures import QUESTIONS
from plamo_study.laws.history import BAD, ORACLE, UNKNOWN, asked, in_order, safe
from plamo_study.measurements import parts, tidy
from plamo_study.plans.history import ASKED, N_PROMPT, SHARED, SLOTS
from plamo_study.plans.hybrids import CONTROLS
from plamo_study.run.parameters import check
from plamo_study.show import charts, theme
from plamo_study.show.findings import finding, name, number
from plamo_study.show.labels import table
from plamo_study.show.tables import folded
from plamo_study.stats import estimates
from plamo_study.stats.estimates import compare

check(source=source, scale=scale, minutes=minutes, device=device)
theme.enable()'''))
cells.append(code('''answered, timed = parts(("17-builds", "17-speeds"), source, scale, minutes, device)
WORDS = {key: each.words for key, each in QUESTIONS.items()} | {"slots": f"{SLOTS} slots", ORACLE: ORACLE, ROTATION: ROTATION}
m = asked(answered).assign(words=lambda of: of.question.map(WORDS))
releases = m[m.build == m.version]  # the others are corrected builds of the newest
VERSIONS = in_order(releases.version)
NEWEST = VERSIONS[-1] if VERSIONS else ""
gates, hybrids = releases[releases.question == ORACLE], releases[releases.question.isin(ASKED)]
CONTROL = {each.rsplit("-", 1)[0] for each in CONTROLS} | {"llama MoE"}
m.head()'''))
cells.append(code('''def since(of, is_good):
    """The first build from which on every later one asked is good; "" where the newest is not."""
    first = ""
    for version in reversed(VERSIONS):
        if not is_good(of[of.version == version]):
            break
        first = version
    return first


def all_right(of):
    """Whether there are answers, and all of them are right."""
    return bool(len(of)) and of.answer.eq("right").all()


def last_bad(of, version):
    """What is wrong in the build before this one, or in the newest where no build is good, in a few words."""
    before = VERSIONS[VERSIONS.index(version) - 1] if version in VERSIONS[1:] else "" if version else NEWEST
    bad = of[of.version.eq(before) & of.answer.isin(BAD)]
    bad = bad.sort_values("question", key=lambda each: each.map(ASKED.index))
    said = bad.groupby("answer").words.agg(lambda words: f"all {len(SHARED)}" if len(words) == len(SHARED) else ", ".join(words))
    return "; ".join(f"{answer}: {words}" for answer, words in said.items())


shared = pd.DataFrame(
    [{"architecture": arch, "since": since(of, safe), "kind": "attention" if arch in CONTROL else "recurrent",
      "reads": next((v for v in VERSIONS if not of[of.version == v].answer.eq(UNKNOWN).all()), ""),
      "before": last_bad(of[of.question.isin(SHARED)], since(of, safe))}
     for arch, of in hybrids.groupby("architecture")],
    columns=["architecture", "since", "kind", "reads", "before"],
).sort_values(["kind", "architecture"], ascending=[False, True])  # fmt: skip
right = {model: since(of, all_right) for model, of in gates.groupby("architecture")}
now = shared[shared.kind == "recurrent"]
finding(
    *([f"In llama-cpp-python {NEWEST}, users may share {int(now.since.ne('').sum())} of {len(now)} recurrent "
       f"architectures: every answer to several of them is right, or refused in words.",
       f"{int(now.since.eq(VERSIONS[0]).sum())} of them were so in the oldest of {len(VERSIONS)} builds asked, "
       f"{VERSIONS[0]}, {int((now.since.ne('') & now.since.ne(VERSIONS[0])).sum())} came later."] if VERSIONS else []),
    *(f"One user at a time: {name(model)} agrees with the oracle from {first or 'no build'} on."
      for model, first in right.items()),
    otherwise="`plamo-study measure 17-builds --beside 0.3.20` asks two builds.",
)  # fmt: skip'''))
cells.append(code('''WORST = ["abort", "hang", "error", "killed", "wrong", UNKNOWN, "refused", "right"]
COLORS = {"right": "#a6cbe3", "refused": "#c9ced6", UNKNOWN: "#f3f3f3", "wrong": charts.VERMILION, "abort": charts.INK}
ranked = hybrids[hybrids.question.isin(SHARED)]
ranked = ranked.assign(rank=ranked.answer.map(WORST.index)).sort_values("rank", kind="stable")
worst = ranked.groupby(["architecture", "version"], as_index=False).first()
order = worst.groupby("architecture")["rank"].agg(["min", "sum"]).reset_index().sort_values(["min", "sum", "architecture"])
field = charts.heat(
    worst[["architecture", "version", "answer"]], "version", "architecture", "The worst answer where users share",
    color="answer", colors=COLORS, subtitle="Each row: one architecture. Each column: a release of llama-cpp-python.",
)
field.encoding.x = alt.X("version:O", sort=VERSIONS, axis=alt.Axis(labelAngle=-90, orient="top", title=None))
field.encoding.y = alt.Y("architecture:O", sort=order.architecture.tolist(), title=None)
field.properties(width=26 * max(len(VERSIONS), 1), height=15 * max(len(order), 1))'''))
cells.append(md("""## The question

Every release of llama-cpp-python carries a llama.cpp of its own. People ask which one to run, and since when a hybrid may serve several users. Each build here is compiled from its own release, with the same flags, and driven through its own bindings. All builds are asked the same questions of the same files.

A server does seven things with several users: it reads equal and unequal prompts in one call, reads a prompt beside the steps of others, steps them together, lets one leave while another comes, leaves slots empty, and has five slots. [Notebook 15](15-hybrids.ipynb) explains the questions and what counts as wrong: each sequence is held against itself alone.

A file that a build cannot load is **unknown to it**: the architecture, the tokenizer or a tensor came later. That is no wrong answer.

## Which one should I run?"""))
cells.append(code('''def of(architecture, what="since"):
    """A fact of one architecture, or "" where it was not asked."""
    return next(iter(shared[shared.architecture == architecture][what]), "")


mended = m[(m.build != m.version) & m.architecture.eq("plamo2") & m.question.isin(SHARED)]
good = [build for build, each in mended.groupby("build") if safe(each)]
advice = {
    "one user, PLaMo 2": right.get("plamo-2-1b"),
    "one user, PLaMo 3": right.get("plamo-3-nict-2b"),
    "several users, PLaMo 3": of("plamo3"),
    "several users, PLaMo 2": of("plamo2"),
    "several users, another hybrid": "see its line below",
}
advised = pd.DataFrame([{"who": who, "build": build or "no release asked"} for who, build in advice.items()])
advised.loc[advised.who.eq("several users, PLaMo 2") & advised.build.eq("no release asked"), "build"] = (
    f"no release asked; {' and '.join(good)}, of the newest sources" if good else "no release asked"
)
table(advised, "who build", "From this build on, up to the newest asked.", who="who you are", build="safe from")'''))
cells.append(md("## Safe in parallel since"))
cells.append(code('''table(
    shared.assign(since=shared.since.replace("", "not yet")), "architecture kind reads since before",
    "Since: right in this build and in every later one asked, in all seven questions. Before: what was wrong until then.",
    "No build was asked.", reads="first build that reads it", since="safe since", before="wrong before, or still",
)'''))
cells.append(md("""## What changed, and when

Each line is a question whose answer changed between two neighbouring builds."""))
cells.append(code('''whole = releases.pivot_table(index=["architecture", "words"], columns="version", values="answer", aggfunc="first")
whole = whole.reindex(columns=VERSIONS)
changes = [
    {"version": after, "architecture": arch, "words": words, "before": row[before], "answer": row[after]}
    for (arch, words), row in whole.iterrows()
    for before, after in zip(VERSIONS, VERSIONS[1:])
    if row[before] != row[after]
]  # fmt: skip
changes = pd.DataFrame(changes, columns=["version", "architecture", "words", "before", "answer"])
died = changes[changes.before.isin(BAD) & changes.answer.isin(["right", "refused"])]
born = changes[changes.before.isin(["right", "refused"]) & changes.answer.isin(BAD)]
came = changes[changes.before.eq(UNKNOWN) & changes.answer.ne(UNKNOWN)]
first = changes.before.eq(UNKNOWN) & changes.answer.isin(BAD)
finding(
    f"{len(died)} wrong answers became right, {len(born)} right ones became wrong, and {int(first.sum())} were wrong "
    f"from the build on that first read the file.",
    *(f"{version}: {', '.join(sorted(set(each.architecture)))} {'is' if each.architecture.nunique() == 1 else 'are'} "
      f"wrong no longer in {len(each)} answers." for version, each in died.groupby("version", sort=False)),
)  # fmt: skip'''))
cells.append(code('''grouped = changes.groupby(["version", "architecture", "before", "answer"], sort=False, as_index=False).words.agg(", ".join)
turned = grouped[grouped.before.isin(BAD) | grouped.answer.isin(BAD)]
folded(
    "Every change of an answer",
    table(turned, "version architecture before answer words", otherwise="No answer changed.", version="build",
          before="before", answer="from here on", words="questions"),
    table(grouped.drop(turned.index), "version architecture before answer words", otherwise="No other change.",
          version="build", before="before", answer="from here on", words="questions"),
)  # fmt: skip'''))
cells.append(md("QUOTE1"))
cells.append(md("""## Is one user's answer right?

Both small trained models are held against an independent evaluation in NumPy, the **oracle**, token by token for 320 tokens. The number is the largest relative error of the prompt's logits.

A third file has its head counts as an array that starts with 0, as converters may write a hybrid whose first layer is recurrent. A build then takes the rotation's width from a layer without heads, and rotates nothing. Whether it answers as the same file with its rotation is asked for half a minute."""))
cells.append(code('''seen = releases[releases.question.isin([ORACLE, ROTATION])]
seen = seen.assign(file=seen.architecture.where(seen.question == ORACLE, seen.architecture + ", no rotation (D1)"))
matrix = seen.assign(shown=[f"{e:.5f}" if e == e and e is not None else a for e, a in zip(seen.error, seen.answer)])
matrix = matrix.pivot_table(index="version", columns="file", values="shown", aggfunc="first")
matrix = matrix.reindex(VERSIONS).rename_axis(None, axis=1).reset_index()
table(matrix, list(matrix), "Off by so much, or why there is no number.", "No gate was asked.", version="build")'''))
cells.append(md("""## Would the page notice?

The build `corrected` is the newest release with two patches of ours for PLaMo 2. Two more builds have one of the patches each: the other one is reversed, which plants a defect that is known. The same questions are asked of all four."""))
cells.append(code('''planted = m[m.version.eq(NEWEST) & m.architecture.eq("plamo2") & m.question.isin(ASKED)]
planted = planted.assign(build=planted.build.replace({NEWEST: f"{NEWEST} as released"}))
wide = planted.pivot_table(index="words", columns="build", values="answer", aggfunc="first").rename_axis(None, axis=1)
wide = wide.loc[[WORDS[each] for each in ASKED if WORDS[each] in wide.index]].reset_index()
table(wide, list(wide), "PLaMo 2 in the newest release.",
      "Not asked: `plamo-study measure 17-builds --beside corrected --beside corrected-states`.", words="question")'''))
cells.append(md("""## Ollama's list

Ollama gives eleven architectures a single slot, whatever the user asks for ([`sched.go`](https://github.com/ollama/ollama/pull/17144), read in September 2026). Three of them read pictures, and the other eight are recurrent. Here are those of the eight that the generator writes."""))
cells.append(code('''OLLAMA = ["qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"]  # and nemotron_h_omni
held = shared[shared.architecture.isin(OLLAMA)].assign(list="one slot")
free = now[now.since.eq("") & ~now.architecture.isin(OLLAMA)].assign(list="several slots")
beside = pd.concat([held, free])
beside = beside.assign(here=beside.since.ne("").map({True: "safe", False: "not safe"}))
finding(
    f"{int(held.since.ne('').sum())} of {len(held)} recurrent architectures that Ollama keeps to one slot are safe in "
    f"{NEWEST}; {len(free)} that it does not list are not: {', '.join(map(name, free.architecture)) or 'none'}.",
)'''))
cells.append(code('''table(beside, "architecture list here since before", "", "None of them was asked.", list="in Ollama",
      here=f"in {NEWEST}", since="safe since", before="wrong before, or still")'''))
cells.append(md(f"""## How fast is each build?

A prompt of 512 tokens and one step of 1, 4, 5, 8, 9 and 16 sequences, in full-size files with random weights of three types. All builds take turns in the same blocks, and each build's file is held against the oracle before it is timed."""))
cells.append(code('''speeds = tidy(timed) if len(timed.rows) else tidy()
speeds = speeds[speeds.usable.astype(bool) & speeds.metric.isin(["prefill", "step"])]
speeds = speeds.assign(build=speeds.build.replace({"stock": NEWEST}))
phase = "step of " + speeds.n_seq.astype(str)
speeds = speeds.assign(phase=phase.where(speeds.metric.ne("prefill"), f"prompt of {N_PROMPT}"))
TIMED = in_order(speeds.build)
LAST = TIMED[-1] if TIMED else ""
CELL = ["model", "dtype", "phase", "n_prompt", "n_seq", "metric"]
against = [
    compare(speeds, f"build == '{build}'", f"build == '{LAST}'", by=CELL).assign(build=build) for build in TIMED[:-1]
]
against = pd.concat(against) if against else compare(speeds, "build == ''", "build == ''", by=CELL).assign(build="")
against[["build", "model", "dtype", "phase", "value", "low", "high", "n"]].head()'''))
cells.append(code('''REAL = 0.05  # a change that somebody would update for
tested = estimates.family(
    [estimates.within(r.build, f"{r.model} {r.dtype}, {r.phase}", r.estimate, 1 - REAL, 1 + REAL)
     for r in against.itertuples()]
)  # fmt: skip
moved = tested[tested.verdict == "does not hold"]
finding(
    *([f"{len(moved)} of {len(tested)} times differ from {LAST}'s by more than {REAL:.0%}; "
       f"{int(tested.verdict.eq('holds').sum())} are within that, and {int(tested.verdict.eq('inconclusive').sum())} "
       f"are inconclusive."] if len(tested) else []),
    otherwise="`plamo-study measure 17-speeds --scale shape --beside 0.3.20` times two builds.",
)  # fmt: skip'''))
cells.append(code('''SHOWN = [f"prompt of {N_PROMPT}", "step of 1", "step of 8", "step of 16"]
drawn = against[against.phase.isin(SHOWN) & against.dtype.eq("Q8_0")]
last = drawn.drop_duplicates(["model", "phase"]).assign(build=LAST, value=1.0, low=1.0, high=1.0)
drawn = pd.concat([drawn, last])[["model", "phase", "build", "value", "low", "high"]]
base = alt.Chart(drawn).encode(
    x=alt.X("build:O", sort=TIMED, title="llama-cpp-python", axis=alt.Axis(labelAngle=-45)),
    color=alt.Color("phase:N", title=None, sort=SHOWN),
)
ratio = alt.Y("value:Q", title=f"time over {LAST}'s", scale=alt.Scale(zero=False))
both = alt.layer(
    base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q", title=f"time over {LAST}'s"), y2="high:Q"),
    base.mark_line().encode(y=ratio), base.mark_point().encode(y=ratio),
).properties(width=230, height=220)
said = "; ".join(f"{r.model}, {r.phase}, {r.build}: {r.value:.2f}" for r in drawn.itertuples())
both.facet(column=alt.Column("model:N", title=None)).properties(
    title="Time of each phase by build, Q8_0, the newest being 1", description=f"Time over that of {LAST}. {said}."
)'''))
cells.append(code('''listed = moved.assign(build=moved.claim, what=moved.model).sort_values("build")
by_cell = against.assign(of=against.model + " " + against.dtype).sort_values(["of", "build"])
folded(
    "Every time, and those that differ",
    table(listed, "build what estimate", f"Time over that of {LAST}, corrected for {len(tested)} comparisons.",
          "None differs.", what="file and phase", estimate="time"),
    table(by_cell, "of phase build estimate second", f"Time over that of {LAST}.", "Nothing was timed.", of="file",
          estimate="time", second=f"{LAST} (s)"),
)  # fmt: skip'''))
cells.append(md("QUOTE2"))
cells.append(md("""## A new release

`plamo-study engine add 0.3.37` fetches a release, notes the hash of its sources in `data/upstream/releases.toml`, compiles it and asks it everything above but the times."""))
cells.append(code('''when = answered.rows.started.max()[:10] if len(answered.rows) else ""
finding(*([f"Last asked on {when}: {', '.join(VERSIONS)}."] if when else []), otherwise="No build was asked.")'''))
cells.append(md("""## Try it

Change a line above, or uncomment one of these."""))
cells.append(code('''# whole.loc["qwen3next"]  # every answer of one architecture
# m[m.answer == "wrong"].nlargest(10, "error")[["build", "architecture", "words", "error"]]
# against[against.phase == "step of 9"].pivot_table(index="build", columns=["model", "dtype"], values="value")'''))
cells.append(md("""## Takeaway

TAKE

## What would change this

- **Files of today.** All builds read files that today's generator and converter wrote. A file that an older converter wrote may load where today's does not.
- **Random weights, two layers, one thread.** As in notebook 15: a defect that needs many layers is not met. Six questions are not a proof.
- **One processor.** Kernels for other processors and for GPUs are other code.
- **Neighbours, not commits.** Builds are weeks apart, and a change lies somewhere between two of them."""))
nb=new_notebook(cells=cells)
nb.metadata={"kernelspec":{"display_name":"Python 3","language":"python","name":"python3"},"language_info":{"name":"python"}}
nbformat.write(nb,"notebooks/17-builds.ipynb")
