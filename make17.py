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
nb=new_notebook(cells=cells)
