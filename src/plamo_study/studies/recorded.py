"""The rows of every study at once: a notebook's own are measured when live, the others are read from disk."""

from plamo_study.errors import StudyError
from plamo_study.measure import recording
from plamo_study.measure.recording import Recording, read
from plamo_study.studies import collect, registry as studies


def every_study(notebook: str, source: str, scale: str, minutes: float = 0) -> list[Recording]:
    """All studies but experiments with rows at this scale, the notebook's own first; live measures what its own lack.

    Raises StudyError for an unknown source or scale, or where no study has any row.
    """
    recording.check_source(source)
    own = [study for study, _ in studies.of_notebook(notebook, scale)]
    measured = [collect.collect(study, source, scale, minutes) for study in own if source == "live"]
    left_out = {name for name, study in studies.STUDIES.items() if study.aside} | {each.study for each in measured}
    rest = [study for study in (*own, *studies.STUDIES) if study not in left_out]
    found = [*measured, *filter(None, (read(study, source, scale) for study in dict.fromkeys(rest)))]
    if not found:
        why = f"no study has rows at scale {scale!r}"
        raise StudyError(notebook, why, f"plamo-study run {notebook} --scale mini")
    return found
