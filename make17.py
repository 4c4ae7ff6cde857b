"""Write notebooks/17-builds.ipynb."""
import nbformat
from nbformat.v4 import new_code_cell as code, new_markdown_cell as md, new_notebook
cells=[md("# Which build of llama.cpp is right, and since when may users share it?")]
c=code('''source: str = "recorded"  # recorded: rows of the reference machine, at once; live: ask here what is missing
scale: str = "mini"  # the files are small, whatever the scale
minutes: float = 0  # live: within so many minutes; 0: as long as it takes
device: str = "auto"  # live: cpu, gpu, or auto: a GPU where there is one, and its host's CPU; recorded: no effect''')
c.metadata={"tags":["parameters"]}; cells.append(c)
cells.append(code('''import altair as alt
import pandas as pd

from llama_meter.workloads.architectures import QUESTIONS
from plamo_study.measurements import recording
from plamo_study.plans.history import ASKED
from plamo_study.plans.hybrids import CONTROLS, RECURRENT
from plamo_study.run.parameters import check
from plamo_study.show import charts, theme
from plamo_study.show.findings import finding, name, question, questions
from plamo_study.show.labels import table
from plamo_study.show.tables import folded

check(source=source, scale=scale, minutes=minutes, device=device)
theme.enable()'''))
cells.append(code('''ask = recording("17-builds", source, scale, minutes, device)
rows = ask.rows
rows = rows.assign(version=[ask.facts[each]["binding"].rpartition(" ")[2] for each in rows.engine])
rows = rows[rows.build.eq("stock") | rows.build.eq(rows.version)]
UNKNOWN = "unknown model architecture"


def answer(row):
    """What came of a question, in a word."""
    if row.status != "ok":
        return "unknown to it" if UNKNOWN in row.failure else row.status
    if row.workload == "gate":
        return "right" if row.verdict == "valid" else "wrong"
    return "refused" if row.checks["refused"] else "wrong" if row.checks["error"] > row.checks["tolerance"] else "right"


rows = rows.assign(answer=[answer(row) for row in rows.itertuples()]) if len(rows) else rows.assign(answer="")
VERSIONS = sorted(rows.version.unique(), key=lambda version: [int(part) for part in version.split(".")])
short = rows.model.str.replace("-dense", "").str.replace("-moe", "")
rows = rows.assign(architecture=short.where(rows.model != "llama-moe", "llama MoE"), question=rows.label)
hybrids = rows[rows.workload.eq("hybrid") & rows.model.isin(RECURRENT)]
attention = rows[rows.workload.eq("hybrid") & rows.model.isin(CONTROLS)]
gates = rows[rows.workload.eq("gate")]
rows[["version", "architecture", "workload", "question", "answer"]].head()'''))
cells.append(code('''SHARED = ["equal", "unequal", "late", "steps", "left", "gaps"]  # what a server does for several users
BAD = ["wrong", "abort", "hang", "error", "killed"]
NEWEST = VERSIONS[-1] if VERSIONS else ""


def safe(of):
    """Whether every one of some answers is right, or refused in words."""
    return bool(len(of)) and not of.answer.isin([*BAD, "unknown to it"]).any()


def since(architecture):
    """The first build from which on users may share this architecture in every build asked; "" for none."""
    of = rows[rows.architecture.eq(architecture) & rows.question.isin(SHARED)]
    first = ""
    for version in reversed(VERSIONS):
        if not safe(of[of.version == version]):
            break
        first = version
    return first


shared = pd.DataFrame(
    [{"architecture": each, "since": since(each), "first": next(
        (v for v in VERSIONS if not of[of.version == v].answer.eq("unknown to it").all()), ""
    )} for each, of in rows[rows.workload.eq("hybrid")].groupby("architecture")],
    columns=["architecture", "since", "first"],
)
now = shared[shared.architecture.isin(hybrids.architecture)]
finding(
    f"In {NEWEST}, {int(now.since.ne('').sum())} of {len(now)} recurrent architectures answer several users rightly.",
    *(f"{model}: {', '.join(gates[(gates.model == model) & gates.answer.eq('right')].version)} agree with the oracle."
      for model in gates.model.unique()),
    otherwise="Not asked yet: `plamo-study measure 17-builds --reference --beside VERSION` does.",
)  # fmt: skip'''))
cells.append(code('''WORST = ["abort", "hang", "error", "killed", "wrong", "unknown to it", "refused", "right"]
COLORS = {"right": "#a6cbe3", "refused": "#dddddd", "unknown to it": "#f3f3f3", "wrong": charts.VERMILION,
          "abort": charts.INK}  # fmt: skip
ranked = rows[rows.workload.eq("hybrid") & rows.question.isin(SHARED)]
ranked = ranked.assign(rank=ranked.answer.map(WORST.index)).sort_values("rank", kind="stable")
worst = ranked.groupby(["architecture", "version"], as_index=False).first()[["architecture", "version", "answer", "rank"]]
order = worst.groupby("architecture")["rank"].agg(["min", "sum"]).reset_index().sort_values(["min", "sum", "architecture"])
field = charts.heat(
    worst, "version", "architecture", "The worst answer when users share the engine, by build", color="answer",
    colors=COLORS, subtitle="Each row: one architecture. Each column: a release of llama-cpp-python.",
)
field.encoding.x = alt.X("version:O", sort=VERSIONS, axis=alt.Axis(labelAngle=-90, orient="top", title=None))
field.encoding.y = alt.Y("architecture:O", sort=order.architecture.tolist(), title=None)
field.properties(width=34 * max(len(VERSIONS), 1), height=15 * max(len(order), 1))'''))
cells.append(md("""## The question

Every release of llama-cpp-python carries a llama.cpp of its own. People ask which one to run, and since when a hybrid may serve several users. Each build here is compiled from its own release and driven through its own bindings. All builds are asked the same questions of the same files.

Files that a build cannot read count as *unknown to it*, and not as wrong: an architecture, a tokenizer or a tensor that came later.

## Since when may users share it?"""))
cells.append(code('''table(
    shared.assign(since=shared.since.replace("", "not yet")), "architecture first since",
    "Six questions with several sequences: equal and unequal prompts in one call, a prompt beside steps, steps together, "
    "one that leaves while another comes, and slots with gaps. Since: right in this build and in every later one asked.",
    first="first build that reads it", since="shared rightly since",
)'''))
cells.append(md("## Is the answer right at all?\\n\\nBoth small trained models against the oracle, 320 tokens each."))
cells.append(code('''right = gates.assign(
    error=[row.get("prefill_error") for row in gates.checks],
    at=gates.version.map(VERSIONS.index) if len(gates) else [],
).sort_values(["model", "at"])
table(right, "model version answer error", "The largest relative error of the logits of one prompt.",
      version="build", error="off by")'''))
cells.append(md("""## What would change this

- **Answers, not speed.** Nothing here was timed.
- **Files of today.** A file that an older converter wrote may load where today's does not.
- **One processor.** Kernels for other processors are other code."""))
nb=new_notebook(cells=cells)
nb.metadata={"kernelspec":{"display_name":"Python 3","language":"python","name":"python3"},"language_info":{"name":"python"}}
nbformat.write(nb,"notebooks/17-builds.ipynb")
