"""Tracked documents whose numbers are written from the recorded rows, so that they cannot rot."""

from collections.abc import Callable

import nbformat
from IPython.display import Markdown

from plamo_study import paths
from plamo_study.growing import growing
from plamo_study.measure import serving
from plamo_study.measure.recording import Recording
from plamo_study.present import evidence
from plamo_study.present.evidence import escaped
from plamo_study.present.page_claims import stated
from plamo_study.present.tables import Table
from plamo_study.publish import headlines, upstream
from plamo_study.publish.headlines import recorded
from plamo_study.studies import registry
from plamo_study.studies.chunked import show as chunked
from plamo_study.studies.context import show as context
from plamo_study.studies.disaggregation import show as disaggregation
from plamo_study.studies.levers import gains, show as levers
from plamo_study.studies.machines import analysis as several, show as machines
from plamo_study.studies.recorded import every_study
from plamo_study.studies.replicas import show as replicas
from plamo_study.studies.roofline import show as roofline
from plamo_study.studies.scheduling import show as scheduling
from plamo_study.studies.serving import endurance, show as served
from plamo_study.studies.speculative import plan as speculation, show as speculative
from plamo_study.studies.timeline import show as operators

README, USING, FINDINGS = "README.md", "USING.md", "FINDINGS.md"
PICTURE = paths.DATA / "published" / "readme.png"
BATCHING, PROJECTIONS, PACKING, TILES, ROLLBACK, WAKEUPS, HALVES = (
    f"data/upstream/{name}.md"
    for name in (
        "plamo2-batching", "plamo2-projections", "k-quant-packing", "flash-attention-tiles", "plamo2-rollback",
        "server-wakeups", "x86-half-conversion",
    )
)  # fmt: skip


def findings() -> str:
    """Each notebook's finding in a paragraph, and the tables behind it."""
    parts = [
        _opened("00-start-here"),
        _opened("01-phase-asymmetry"),
        _roofline(),
        _opened("03-batch-scaling"),
        _opened("04-quantization"),
        [str(context.finding(recorded("05-context"), recorded("05-beside")).data)],
        [str(chunked.finding(recorded("06-chunked", scale)).data) for scale in ("shape", "mini")],
        [str(replicas.finding(recorded("07-replicas")).data)],
        _speculation(),
        _disaggregation(),
        [str(scheduling.finding(recorded("10-scheduling", "mini")).data)],
        _served(),
        _levers(),
        _machines(),
        [nbformat.read(paths.NOTEBOOKS / "14-methods.ipynb", as_version=4).cells[1].source],
    ]
    headed = [
        [f"### {name[:2]}: {asks}", *part] for (name, asks), part in zip(registry.NOTEBOOKS.items(), parts, strict=True)
    ]
    rest = evidence.processes(every_study("", "recorded", "shape"))
    return "\n\n".join([text for part in headed for text in part] + ["### Processes", rest])


def _opened(name: str) -> list[str]:
    """What an opened notebook begins with, and its claims with the numbers they rest on, as it is committed."""
    notebook = nbformat.read(paths.NOTEBOOKS / f"{name}.ipynb", as_version=4)
    lines = [f"| {line['claim']} | {escaped(line['of'])} | {line['figure']} |" for line in stated(notebook)]
    return [notebook.cells[1].source, "\n".join(["| claim | of | measured |", "|---|---|---|", *lines])]


def notebooks() -> str:
    """The table of notebooks and what they ask."""
    lines = [f"| [`{name}`](notebooks/{name}.ipynb) | {question} |" for name, question in registry.NOTEBOOKS.items()]
    return "\n".join(["| notebook | question |", "|---|---|", *lines])


def _roofline() -> list[str]:
    recordings = every_study("02-roofline", "recorded", "shape")
    said = [roofline.finding(recordings, roofline.cells(recordings)), operators.finding(recorded("02-trace"))]
    return [str(text.data) for text in said]


def _disaggregation() -> list[str]:
    moved, small = recorded("09-disaggregation"), recorded("09-disaggregation", "mini")
    tables = [
        disaggregation.crossings(moved),
        *(show(small) for show in (disaggregation.identity, disaggregation.services)),
    ]
    said = [str(disaggregation.finding(moved, small).data)]
    return [*said, *(table._repr_markdown_() for table in tables)]


def _speculation() -> list[str]:
    costs = recorded("08-speculative")
    tables = [show(costs) for show in (speculative.break_even, speculative.beside)]
    tables += [speculative.on_text(recorded("08-drafters", "mini"))]
    said = [str(speculative.finding(costs).data), str(speculative.act(costs).data)]
    return [*said, *(table._repr_markdown_() for table in tables)]


def _served() -> list[str]:
    loads = recorded("11-serving", "mini")
    tables = [show(loads) for show in (served.answers, served.crowds, served.prediction, served.knees, served.beside)]
    said = [show(loads) for show in (served.finding, endurance.accounts, endurance.recovered)]
    said += [endurance.recovered(loads, patched=True)]
    return [*(str(text.data) for text in said), *(table._repr_markdown_() for table in tables)]


def _levers() -> list[str]:
    known = gains.recordings("recorded", "shape")
    tables = [show(known) for show in (levers.every, levers.claimed, levers.order)]
    return [str(levers.finding(known).data), *(table._repr_markdown_() for table in tables)]


def _machines() -> list[str]:
    studies = several.recordings("recorded", "shape")
    passes = several.passes(studies)
    tables = [machines.machines(studies, passes), machines.score(passes)]
    return [str(machines.finding(passes, "shape").data), *(table._repr_markdown_() for table in tables)]


def _law() -> Recording:
    return recorded("03-batching-law", "mini")


def _shown(table: Callable[[Recording], Table | Markdown], recording: Callable[[], Recording]) -> Callable[[], str]:
    return lambda: table(recording())._repr_markdown_()


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    README: {"headlines": headlines.all_of_them},
    USING: {"notebooks": notebooks},
    FINDINGS: {"findings": findings},
    BATCHING: {
        "server": lambda: upstream.server_finding(serving.recorded()),
        "load": lambda: upstream.under_load(recorded("11-serving", "mini")),
        "tests": _shown(upstream.three_tests, _law),
        "law": lambda: upstream.law(_law()),
        "aborts": lambda: upstream.first_aborts(_law()),
    },
    PROJECTIONS: {"speed": _shown(upstream.projections, lambda: recorded("03-batch-scaling"))},
    PACKING: {
        "kernels": _shown(upstream.packing, lambda: recorded("04-quantization")),
        "machine": lambda: upstream.machine(recorded("04-quantization")),
    },
    TILES: {
        "speed": _shown(chunked.by_size, lambda: recorded("06-tiles", "mini")),
        "machine": lambda: upstream.machine(recorded("06-tiles", "mini")),
    },
    ROLLBACK: {
        "exact": lambda: upstream.rolled_back(recorded("08-speculative", "mini")),
        "speed": _shown(speculative.beside, lambda: recorded("08-speculative")),
        "memory": lambda: upstream.kept_states(speculation.HYBRID, (4, 8)),
    },
    HALVES: {"speed": lambda: upstream.scales()._repr_markdown_()},
    WAKEUPS: {
        "crowds": _shown(endurance.crowds, lambda: recorded("11-serving", "mini")),
        "held": _shown(endurance.side_by_side, lambda: recorded("11-serving", "mini")),
    },
}


def write() -> bool:
    """Put the generated parts into their documents; returns True."""
    for name in PARTS:
        path = paths.ROOT / name
        with growing(path) as partial:
            partial.write_text(_filled(name, path.read_text(encoding="utf-8")), encoding="utf-8")
    with growing(PICTURE) as partial:
        partial.write_bytes(headlines.picture())
    return True


def is_current() -> bool:
    """Whether the documents say what the rows say."""
    texts = {name: (paths.ROOT / name).read_text(encoding="utf-8") for name in PARTS}
    return all(_filled(name, text) == text for name, text in texts.items())


def _filled(name: str, text: str) -> str:
    for part, written in PARTS[name].items():
        begin, end = f"<!-- {part}: written by `plamo-study readme` -->", f"<!-- end of {part} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n\n{written()}\n\n{end}{after}"
    return text
