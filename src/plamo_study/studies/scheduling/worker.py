"""The process that runs the cells of this study: it serves requests, or starts a server."""

from collections.abc import Callable
from pathlib import Path

from plamo_study.measure import worker
from plamo_study.measure.cells import Traffic
from plamo_study.measure.rows import Measured
from plamo_study.studies.scheduling.plan import SERVER, SPLIT


def run(cell: Traffic, path: Path, stage: Callable[[str], None]) -> Measured:
    """Measure one cell: in this process, with a second process that prefills, or with a server."""
    if cell.rule == SERVER:
        from plamo_study.studies.scheduling import served  # HTTP takes a twelfth of a second to load

        return served.run(cell, path, stage)
    if cell.rule == SPLIT:
        from plamo_study.studies.disaggregation import service
        from plamo_study.studies.scheduling import traffic

        load = traffic.drawn(cell)
        return service.answered(cell, service.Asked(load.prompt, load.output), path, stage)
    from plamo_study.studies.scheduling import workload

    return workload.run(cell, path, stage)


if __name__ == "__main__":
    worker.main({"traffic": run})
