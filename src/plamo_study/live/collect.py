"""Rows for a notebook, of one study or of all: recorded on the reference machine, or live, measured here."""

import os
from dataclasses import replace

from llama_meter import journal
from llama_meter.errors import StudyError
from llama_meter.journal import LOCAL, REFERENCE, journal_path
from llama_meter.measure import plan, runner
from llama_meter.measure.asked import NOTHING, Sweep
from plamo_study.live import budget, conduct, live
from plamo_study.read import frame
from plamo_study.read.recording import Recording, check_device, check_source, of_rows, recorded
from plamo_study.studies import registry as studies

LIVE = "-p source live (papermill), or plamo-study run, which is live by default"


def collect(
    study: str,
    source: str = "recorded",
    scale: str = "mini",
    minutes: float = 0,
    device: str = "auto",
    asked: Sweep = NOTHING,
) -> Recording:
    """The rows of a study: `recorded` reads the tracked journal, `live` first measures here what is missing.

    `scale`: that of the notebook; a study that is always shown at mini is collected at mini. `minutes`: time for
    measuring all that the notebook of this study shows; 0: as long as its plans take. If that is too short for all,
    the first cells of its plan are measured. A live study that there was no time for has no rows, or the recorded ones
    where it is meaningless in part, and one line says so. `device`: where live measures, one of DEVICES; recorded rows
    are shown as they are. `asked`: files and values that a user asked for; these are measured, so the source is live.

    Raises
    ------
    StudyError
        Unknown study, source, scale or device, a GPU asked for where there is none, nothing recorded at this scale, or
        values asked for of recorded rows.

    """
    check_source(source)
    check_device(device)
    if source != "live" and asked != NOTHING:
        raise StudyError(f"source {source!r}", "files and values of your own are measured, not recorded", LIVE)
    if source != "live":
        return recorded(study, source, scale, device)
    at = plan.scale_of(studies.shown_at(study, scale), asked)
    summary, why = _measured(study, scale, at, minutes, device, asked)
    if summary is None and studies.STUDIES[study].whole and journal.stored(journal_path(study, at, REFERENCE)):
        _say(f"*{study} is shown as recorded: {why}.*")
        return recorded(study, "recorded", scale, device)
    if summary is None:
        _say(f"*{study} was not measured here: {why}. To measure it, {conduct.MORE}.*")
        return Recording(frame.frame([], {}), {}, study, at, source, lacks=why)
    records = journal.read(journal_path(study, at, LOCAL))
    return replace(of_rows(summary.rows, records, study, source, at), left_out=summary.left_out)


def _measured(
    study: str, scale: str, at: str, minutes: float, device: str, asked: Sweep
) -> tuple[runner.Summary | None, str]:
    """Summary of a live study, or why there is none."""
    planned = conduct.build(study, studies.shown_at(study, scale), device, asked)
    path, by_command = journal_path(study, at, LOCAL), study in os.environ.get(conduct.MEASURED, "").split()
    if by_command and not path.exists():
        return None, "there was no time for it"
    share = runner.NO_TIME if by_command else budget.of_study(study, scale, minutes, asked)
    if share == budget.LEFT_OUT:
        return None, f"it must be measured whole, and {minutes:g} minutes are too few for the whole page"
    with live.line(study) as line:
        summary = conduct.measure(planned, path, line, asked, announces=not by_command, minutes=share)
    if not conduct.says_something(planned, summary):
        return None, conduct.lacking(summary)
    if studies.STUDIES[study].whole and summary.lacking:
        return None, f"it must be measured whole, and {conduct.lacking(summary)}"
    return summary, ""


def _say(what: str) -> None:
    """Show a line in the notebook."""
    from IPython.display import Markdown, display  # slow to import, and the command line does not need it

    display(Markdown(what))
