"""The measurements of `plamo-study study` without a scale: files of full size, on this machine."""

import time

from plamo_study.cli import report
from plamo_study.measure import recording, runner
from plamo_study.studies import at_hand, collect


def measure(minutes: float | None) -> bool:
    """Write the files and measure within `minutes` (0: no limit), in order of need; whether everything succeeded.

    A study without enough time is left out with a message: its page shows the recorded rows.

    Raises
    ------
    StudyError
        The disk is too full, a file cannot be written, or the engine cannot be probed.

    """
    asked = [(name, scale, collect.build(name, scale)) for name, scale in at_hand.asked()]
    limit, began = at_hand.MINUTES if minutes is None else minutes, time.monotonic()
    lacking = at_hand.missing([planned for *_, planned in asked])
    left = [planned for name, scale, planned in asked if not at_hand.measured(name, scale)]
    if left:
        _say_how_long(left, lacking, limit)
    well, spent = True, 0.0
    for name, scale, _ in asked:
        try:
            share = max(limit - spent / 60, 1e-3) if limit else 0.0
            summary = report.measure(name, scale, recording.LOCAL, minutes=share)
        except runner.NoTimeError as error:
            report.console.print(f"{error.what}: {error.why}; its page shows the recorded rows", soft_wrap=True)
            continue
        well &= not (summary.unexpected or summary.lacking)
        spent += runner.spent_s(summary.rows)
    if left:
        report.console.print(f"files and measuring took {(time.monotonic() - began) / 60:.1f} minutes")
    return well


def _say_how_long(left: list[at_hand.Plan], lacking: dict[str, int], limit: float) -> None:
    """Print the expected duration, and the rates behind it."""
    pace, gated = at_hand.probed(), set[object]()
    measuring = sum(at_hand.measuring_s(planned, pace, gated) for planned in left) / 60
    files, size = at_hand.writing_s(lacking) / 60, sum(lacking.values()) / 1e9
    writing = f"{files:.1f} minutes for {size:.1f} GB of files with random weights, then " if lacking else ""
    within = f", of which at most {limit:g} are used" if 0 < limit < measuring else ""
    report.console.print(
        f"This machine reads {pace.read / 1e9:.0f} GB/s and multiplies {pace.matmul / 1e9:.0f} GFLOP/s. So it takes "
        f"about {writing}{measuring:.1f} minutes for measuring{within}. Leave it alone meanwhile: what else computes "
        "is in the numbers.",
        soft_wrap=True,
    )
