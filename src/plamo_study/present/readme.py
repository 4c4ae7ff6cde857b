"""The README's findings, written from the recorded rows, so that they cannot rot."""

from plamo_study import paths
from plamo_study.measure.collect import collect
from plamo_study.present import phase_asymmetry

BEGIN, END = "<!-- findings: written by `plamo-study readme` -->", "<!-- end of findings -->"
README = "README.md"


def findings() -> str:
    """The generated part: the finding in a sentence, and the tables behind it."""
    recording = collect("01-phase-asymmetry", "recorded", "shape")
    tables = [phase_asymmetry.prefill, phase_asymmetry.decode, phase_asymmetry.crossover]
    parts = [str(phase_asymmetry.finding(recording).data), *(show(recording)._repr_markdown_() for show in tables)]
    return "\n\n".join(parts)


def write() -> bool:
    """Put the findings into the README; returns True."""
    path = paths.ROOT / README
    path.write_text(_with_findings(path.read_text(encoding="utf-8")), encoding="utf-8")
    return True


def is_current() -> bool:
    """Whether the README says what the rows say."""
    text = (paths.ROOT / README).read_text(encoding="utf-8")
    return _with_findings(text) == text


def _with_findings(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{findings()}\n\n{END}{after}"
