"""Studies on several machines at once: a task a study, on hosts that SSH reaches, their rows sent home one by one.

Every host has a clone of this repository with its environment. It makes its own models and keeps its own journals; what
comes home is checked line by line and filed under the machine's id, as `plamo-study rows add` does it.

Dask deals the tasks. Its scheduler runs here and its workers are started over SSH, as those of its `SSHCluster` are.
They speak TLS with keys that are made for this one call and lie in a file that only the host's own user may read.
"""

import asyncio
import json
import sys
import tomllib
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import msgspec

from plamo_study.errors import StudyError
from plamo_study.measure import journal, packing, recording, runner
from plamo_study.measure.rows import SCHEMA, Fact, Record
from plamo_study.studies import collect, registry
from plamo_study.studies.cluster import INSTALL

ROWS = "rows"  # what they come home under
ONE = "measuring"  # of which every host has one: two tasks at once would time each other
PATIENCE_S = 60.0  # for a host to answer, and to load Python
LOOK_S = 1.0  # between looks at who is still there
EXAMPLE = '[[host]]\\naddress = "mac.local"\\npython = "plamo-study/.venv/bin/python"'
SPEAKS = (
    "import sys, distributed, plamo_study.studies.fleet as fleet;"
    "print('plamo-study', sys.version_info[:2], distributed.__version__, fleet.SCHEMA)"
)
SETTINGS = {  # of Dask: nothing is served by HTTP, and nothing but measuring takes the cores
    "scheduler": {"http": {"routes": []}},
    "worker": {"http": {"routes": []}, "profile": {"enabled": False}},
    "admin": {"tick": {"interval": "1s"}},
}
KEEP = 'umask 077; file=$(mktemp -t plamo-study.XXXXXX); cat > "$file"; mv "$file" "$file.json"; echo "$file.json"'
NOT_HOME = "does not find the way here: set `home` in the file of hosts, and let this machine be reached"
LOUD = 50  # of Dask's log: the worst only
T = TypeVar("T")
Tell = Callable[[str, int], None]  # a host, and how many rows of it are new here
Came = tuple[str, str, bytes]  # a host, what it measures, and rows of it as a pack


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine as SSH knows it, and the Python of the clone that lies there."""

    address: str
    python: str


class Hosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of hosts. `home`: where they reach this machine, by default found out; `ssh_config`: instead of the
    user's own, which says ports, users, keys and gateways."""

    host: tuple[Host, ...]
    home: str = ""
    ssh_config: str = ""


@dataclass(frozen=True)
class Asked:
    """A study to measure at a scale within some minutes (0: what its plan takes), on one host or (\"\") on any."""

    study: str
    scale: str
    minutes: float
    host: str = ""

    def __str__(self) -> str:
        return f"{self.study} at {self.scale}" + (f" on {self.host}" if self.host else "")


@dataclass(frozen=True)
class Outcome:
    """What became of a study: the host that was asked or that measured it ("" for none), and what went wrong, if
    anything."""

    what: str
    host: str
    wrong: str = ""


def read(path: Path) -> Hosts:
    """The hosts of a TOML file; StudyError for what is none."""
    try:
        found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Hosts)
    except (OSError, ValueError) as error:  # a TOMLDecodeError and a ValidationError are ValueErrors
        raise StudyError(str(path), f"is no list of hosts ({error})", f"printf '{EXAMPLE}' > {path}") from error
    names = [host.address for host in found.host]
    if not names or len(set(names)) < len(names):
        raise StudyError(str(path), "names no host, or one of them twice", "name every host once; ssh may know aliases")
    return found


def measure(hosts: Hosts, studies: Sequence[Asked], divided: bool, tell: Tell) -> Iterator[Outcome]:
    """Measure studies on all hosts, or divided among them, and file the rows as they come; what became of each.

    A host that cannot be used, or is lost, is an outcome. Divided, its studies are measured by another; the rows that
    it sent stay. `tell` is called as they come.

    Raises
    ------
    StudyError
        Dask is not installed here, no host can be used, or their workers do not start.

    """
    _import()
    from distributed.security import Security

    keys = Security.temporary()
    prepared = asyncio.run(_each(_prepared(host, hosts, keys) for host in hosts.host))
    tried = dict(zip(hosts.host, prepared, strict=True))
    good = {host: found.file for host, found in tried.items() if not found.why}
    bad = [Outcome("every study", host.address, found.why) for host, found in tried.items() if found.why]
    if not good:
        said = "; ".join(f"{each.host}: {each.wrong}" for each in bad)
        raise StudyError("no host", f"can be used ({said})", "ssh HOST true, and the same version there as here")
    yield from bad
    with _cluster(hosts, good, keys) as client:
        there = _alive(client)
        yield from (Outcome("every study", host.address, NOT_HOME) for host in good if host.address not in there)
        everywhere = [replace(each, host=name) for name in sorted(there) for each in studies]
        yield from _dealt(client, list(studies) if divided else everywhere, tell)


def _import() -> None:
    try:
        import asyncssh  # noqa: F401
        import distributed  # noqa: F401
    except ImportError as error:
        raise StudyError("--hosts", f"needs Dask and asyncssh ({error})", INSTALL) from error


@dataclass(frozen=True)
class _Tried:
    """Why a host cannot be used; else the file there that holds Dask's settings."""

    why: str = ""
    file: str = ""


async def _each(tasks: Iterator[Coroutine[Any, Any, T]]) -> list[T]:
    return list(await asyncio.gather(*tasks))


async def _prepared(host: Host, hosts: Hosts, keys: Any) -> _Tried:
    """Ask a host what it is, and hand it the settings of its worker: by a file, since a command is seen by all."""
    import asyncssh
    import distributed

    due = f"plamo-study {sys.version_info[:2]} {distributed.__version__} {SCHEMA}"
    tls = {"ca-file": keys.tls_ca_file, "worker": {"cert": keys.tls_worker_cert, "key": keys.tls_worker_key}}
    settings = {"distributed": SETTINGS | {"comm": {"require-encryption": True, "tls": tls}}}
    try:
        async with asyncio.timeout(PATIENCE_S):
            async with asyncssh.connect(host.address, **_options(hosts)) as connection:
                found = await connection.run(f'{host.python} -c "{SPEAKS}"')
                kept = await connection.run(KEEP, input=json.dumps(settings))
    except (OSError, ValueError, asyncssh.Error) as error:  # a TimeoutError is an OSError
        return _Tried(f"not reached ({str(error) or type(error).__name__})")
    if kept.exit_status:
        return _Tried(f"keeps no file of its user's own ({str(kept.stderr).strip()})")
    if found.exit_status:
        said = "".join(str(found.stderr).strip().splitlines()[-1:])
        return _Tried(f"{host.python} does not know this project ({said}); there: {INSTALL}")
    if (said := str(found.stdout).strip()) != due:
        return _Tried(f"speaks {said!r} and this machine {due!r}: install the same lock file")
    return _Tried(file=str(kept.stdout).strip())


async def _removed(host: Host, hosts: Hosts, file: str) -> None:
    import asyncssh

    with suppress(OSError, ValueError, asyncssh.Error):
        async with asyncio.timeout(PATIENCE_S), asyncssh.connect(host.address, **_options(hosts)) as connection:
            await connection.run(f"rm -f '{file}'")


def _options(hosts: Hosts) -> dict[str, Any]:
    return {"config": [str(Path(hosts.ssh_config).expanduser())]} if hosts.ssh_config else {}


@contextmanager
def _cluster(hosts: Hosts, good: Mapping[Host, str], keys: Any) -> Iterator[Any]:
    """A client of a scheduler in this process, with a worker on every host that finds the way home."""
    import dask
    from distributed import Client, Scheduler, SpecCluster
    from distributed.deploy.ssh import Worker
    from distributed.utils import get_ip

    scheduler = {
        "host": f"tls://{hosts.home or get_ip()}",
        "port": 0,
        "security": keys,
        "dashboard_address": "127.0.0.1:0",
    }
    workers = {
        host.address: {
            "cls": Worker,
            "options": {
                "address": host.address, "connect_options": _options(hosts),
                "remote_python": f"env -u DASK_INTERNAL_INHERIT_CONFIG DASK_CONFIG='{file}' {host.python}",
                "worker_class": "distributed.Worker",  # one that dies is not started again: another host goes on
                "kwargs": {"name": host.address, "nthreads": 1, "resources": {ONE: 1, host.address: 1},
                           "memory_limit": 0, "dashboard": False, "death_timeout": PATIENCE_S},
            },
        }
        for host, file in good.items()
    }  # fmt: skip
    with ExitStack() as stack:
        patient = {"scheduler": {"allowed-failures": len(workers)}}
        ours = dask.config.merge(dask.config.get("distributed"), SETTINGS, patient)
        stack.enter_context(dask.config.set({"distributed": ours}))
        try:
            spec = {"cls": Scheduler, "options": scheduler}
            cluster = stack.enter_context(SpecCluster(workers, spec, security=keys, silence_logs=LOUD))
            client = stack.enter_context(Client(cluster, security=keys))
        except (RuntimeError, OSError) as error:  # a worker that ends at once, an address that is not this machine's
            how = "name this machine's address as `home` in the file of hosts"
            raise StudyError("the hosts' workers", f"do not start ({error})", how) from error
        with suppress(TimeoutError):  # who is not there is named
            client.wait_for_workers(len(workers), timeout=PATIENCE_S)
        asyncio.run(_each(_removed(host, hosts, file) for host, file in good.items()))
        yield client


def _alive(client: Any) -> set[str]:
    workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"].values()
    return {str(worker["name"]) for worker in workers}


def _dealt(client: Any, tasks: Sequence[Asked], tell: Tell) -> Iterator[Outcome]:
    """Give every host one study at a time. What is measured comes as events, in order; results carry nothing."""
    came: SimpleQueue[Came] = SimpleQueue()
    client.subscribe_topic(ROWS, lambda event: came.put(event[1]))
    waiting, left, by = deque(tasks), dict[Any, Asked](), dict[str, str]()
    while waiting or left:
        alive = _alive(client)
        while waiting and (waiting[0].host or len(left) < max(len(alive), 1)):
            asked = waiting.popleft()
            wanted = {ONE: 1} | ({asked.host: 1} if asked.host else {})
            left[client.submit(_measured, asked, key=f"{asked}", resources=wanted)] = asked
        yield from _filed(came, by, tell)
        for future, asked in list(left.items()):
            lost = asked.host not in alive if asked.host else not alive
            if future.done() or lost:
                del left[future]
                yield from _filed(came, by, tell)
                yield _ended(future, asked, by)


def _ended(future: Any, asked: Asked, by: Mapping[str, str]) -> Outcome:
    host = by.get(f"{asked}", asked.host)
    if future.status == "finished":
        return Outcome(f"{asked}", host)
    if future.status == "error":
        return Outcome(f"{asked}", host, f"{future.exception()}")
    future.cancel()
    return Outcome(f"{asked}", host, "lost; the rows that were sent are kept")


def _filed(came: "SimpleQueue[Came]", by: dict[str, str], tell: Tell) -> Iterator[Outcome]:
    """File the rows that came, after waiting LOOK_S for the first of them; what could not be filed."""
    seconds = LOOK_S
    with suppress(Empty):
        while True:
            host, what, packed = came.get(timeout=seconds)
            seconds, by[what] = 0.0, host
            try:
                tell(host, packing.add(packed, registry.STUDIES)[1])
            except StudyError as error:
                yield Outcome(what, host, f"sent what cannot be filed: {error}")


def _measured(asked: Asked) -> None:
    """On a host: measure, and send every row home; at the end all of the journal, for what earlier calls measured."""
    from distributed import get_worker

    worker = get_worker()
    path = recording.journal_path(asked.study, asked.scale, recording.LOCAL)

    def send(machine: str, records: list[Record]) -> None:
        worker.log_event(ROWS, (worker.name, f"{asked}", packing.packed(machine, {path.stem: records})))

    @cache  # all are written before the first row
    def facts() -> list[Record]:
        return [record for record in journal.read(path) if isinstance(record, Fact)]

    def told(progress: runner.Progress) -> None:
        if row := progress.row:
            send(row.machine, [*facts(), row])

    planned = collect.build(asked.study, asked.scale)
    summary = collect.measure(planned, path, told, minutes=asked.minutes)
    send(summary.rows[-1].machine, journal.read(path))
