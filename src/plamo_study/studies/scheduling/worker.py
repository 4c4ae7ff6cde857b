"""The process that the cells of this study run in."""

from collections.abc import Callable
from pathlib import Path

from plamo_study.measure import worker
from plamo_study.measure.cells import Traffic
from plamo_study.measure.rows import Measured
from plamo_study.studies.scheduling.plan import SERVER


def run(cell: Traffic, path: Path, stage: Callable[[str], None]) -> Measured:
    """Do one cell: in this process, or by a server."""
    if cell.rule == SERVER:
        from plamo_study.studies.scheduling import served  # HTTP takes a twelfth of a second to load

        return served.run(cell, path, stage)
    from plamo_study.studies.scheduling import workload

    return workload.run(cell, path, stage)


if __name__ == "__main__":
    worker.main({"traffic": run})
