"""Simulations on the workers of a running Dask cluster: `plamo-study measure STUDY --scheduler ADDRESS`.

Every worker needs this project at this version, and the rows that simulations use. Anyone who reaches a Dask scheduler
can run code on it and on its workers, and these can run code here, since their answers are unpickled. So use only
workers of your own, in a trusted network or behind TLS (Dask's own settings).
"""

from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager

from llama_meter.errors import StudyError
from llama_meter.measure.process import Outcome, work
from llama_meter.measure.runner import Elsewhere
from llama_meter.measure.worker import Job
from llama_meter.rows import SCHEMA, Evidence, Failure

PATIENCE_S = 10.0  # for the scheduler to answer
INSTALL = "uv pip install -e '.[fleet]'"
START = "dask scheduler, and dask worker ADDRESS in this project's environment"


@contextmanager
def connected(address: str) -> Iterator[Elsewhere]:
    """Connect to all workers of the scheduler at this address, one job per worker thread.

    Raises
    ------
    StudyError
        Dask is not installed, no scheduler answers, it has no workers, or one of them has another version of this
        project; later, in a sweep, when the scheduler is lost.

    """
    try:
        from distributed import Client
        from distributed.scheduler import KilledWorker
    except ImportError as error:
        raise StudyError("--scheduler", f"needs Dask ({error})", INSTALL) from error
    try:
        client = Client(address, timeout=PATIENCE_S, set_as_default=False)
    except (OSError, ValueError) as error:  # a TimeoutError is an OSError
        raise StudyError(f"scheduler {address}", f"is not reached ({error})", START) from error

    def there(job: Job, time_limit_s: float, engine: str = "", workload: str = "") -> Outcome:
        try:
            future = client.submit(work, job, time_limit_s, engine, workload, pure=False)
            return future.result()  # type: ignore[no-any-return] # what `work` returns
        except KilledWorker as error:
            failure = Failure(stage="start", message=f"all its workers were lost, one after another ({error})")
            return Outcome(status="killed", pid=0, evidence=Evidence(), failure=failure)
        except (CancelledError, OSError) as error:
            how = "restart it and repeat the command: finished simulations are kept"
            raise StudyError(f"scheduler {address}", f"was lost ({error})", how) from error

    with client:
        if not (workers := client.run(_schema, on_error="return")):
            raise StudyError(f"scheduler {address}", "has no workers", f"dask worker {address}")
        for worker, schema in workers.items():
            if schema != SCHEMA:
                why = f"does not have this version of the project ({schema})"
                raise StudyError(f"worker {worker}", why, f"check out the same commit there; {INSTALL}")
        yield Elsewhere(there, sum(client.nthreads().values()))


def _schema() -> int:
    return SCHEMA
