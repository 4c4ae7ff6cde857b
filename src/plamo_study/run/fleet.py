"""Studies on several machines at once: one task per study, on hosts that SSH reaches, rows sent home one by one.

Every host has a clone of this repository with its environment. It makes its own models and keeps its own journals; what
comes home is checked line by line and filed under the machine's id, as `plamo-study rows add` does it.

A host may only send rows, which can be false like any others. It runs nothing here and learns nothing of this machine:
calls go from here to there, by SSH alone, and the reply is bytes, which are read within limits. No key is stored on a
host, and the user's SSH agent is not forwarded. On a host, this machine may do what its user there may do.

Dask deals out the tasks, all within this process: one worker per host waits for what the host sends, and is closed when
the host is lost. Workers talk in memory only: Dask runs whatever it is sent, so it listens on no address.
"""

import asyncio
import math
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from llama_meter import packs
from llama_meter.disk import MOST_SETTINGS, check_file, expanded, plain, text, toml
from llama_meter.errors import StudyError
from plamo_study.plans import registry
from plamo_study.run import fleet_host
from plamo_study.run.cluster import INSTALL
from plamo_study.run.fleet_host import SIZE, Asked

READ_WHOLE = ("identityfile", "certificatefile", "userknownhostsfile", "globalknownhostsfile")  # options of SSH
MOST_SAID = 2000  # last bytes of a host's output, which are kept
ROWS = "rows"  # topic of the events that bring them home
ONE = "measuring"  # resource, one per host: two tasks at once would disturb each other
PATIENCE_S = 60.0  # for a host to answer, and to load Python
SIGN_OF_LIFE_S = 15.0  # a connection that answers nothing for three times as long is lost
LOOK_S = 1.0  # between looks at who is still there
EXAMPLE = '[[host]]\naddress = "mac.local"\npython = "plamo-study/.venv/bin/python"'
SPEAKS = f"import {fleet_host.__name__} as host; print(host.READY)"
SETTINGS = {  # of Dask: nothing is served by HTTP, and nothing but measuring takes the cores
    "scheduler": {"http": {"routes": []}},
    "worker": {"http": {"routes": []}, "profile": {"enabled": False}},
    "admin": {"tick": {"interval": "1s"}},
}
HERE = {"protocol": "inproc://", "dashboard_address": "127.0.0.1:0"}
LOUD = 50  # of Dask's log: the worst only
Tell = Callable[[str, int], None]  # a host, and how many rows of it are new here
Came = tuple[str, str, bytes]  # a host, what it measures, and rows of it as a pack


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine as SSH knows it, and the Python of its clone of this repository."""

    address: str
    python: str


class Hosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of hosts. `ssh_config`: replaces the user's own, which sets ports, users, keys and gateways."""

    host: tuple[Host, ...]
    ssh_config: str = ""


class LostError(Exception):
    """A host that will send nothing more."""


@dataclass(frozen=True)
class Outcome:
    """What became of a study: the host that was asked or that measured it ("" for none), and what went wrong, if
    anything."""

    what: str
    host: str
    wrong: str = ""


def read(path: Path) -> Hosts:
    """The hosts of a TOML file; StudyError if it is not a valid one."""
    mend = f"printf '{EXAMPLE}' > {path}"
    try:
        hosts = msgspec.convert(toml(path, mend), Hosts)
    except msgspec.ValidationError as error:
        raise StudyError(str(path), f"is no list of hosts ({error})", mend) from error
    names = [host.address for host in hosts.host]
    if not names or len(set(names)) < len(names):
        raise StudyError(str(path), "names no host, or names one twice", "name every host once; ssh may know aliases")
    if hosts.ssh_config:
        _check_ssh_config(expanded(hosts.ssh_config))
    return hosts


def _check_ssh_config(path: Path) -> None:
    """StudyError unless a configuration of SSH and the keys and known hosts that it names can be read to their ends."""
    for line in text(path, MOST_SETTINGS).splitlines():
        option, *words = line.replace("=", " ", 1).split() or [""]
        if option.lower() in READ_WHOLE:
            named = (expanded(word.strip("\"'")) for word in words)
            for file in (entry for entry in named if entry.exists() and entry != Path(os.devnull)):
                check_file(file, MOST_SETTINGS)


def measure(hosts: Hosts, studies: Sequence[Asked], divided: bool, tell: Tell) -> Iterator[Outcome]:
    """Measure studies on all hosts, or divide them among hosts; file rows as they come and yield each study's outcome.

    A host that cannot be used, or is lost, is an outcome too. If divided, another host measures its studies; rows that
    it sent stay. `tell` is called for every pack of rows.

    Raises
    ------
    StudyError
        Dask or asyncssh is not installed here, or no host can be used.

    """
    _import()
    why = dict(zip(hosts.host, asyncio.run(_reasons(hosts)), strict=True))
    good = [host for host in hosts.host if not why[host]]
    bad = [Outcome("every study", host.address, wrong) for host, wrong in why.items() if wrong]
    if not good:
        said = "; ".join(f"{outcome.host}: {outcome.wrong}" for outcome in bad)
        raise StudyError("no host", f"can be used ({said})", "ssh HOST true, and the same version there as here")
    yield from bad
    asked = list(studies) if divided else [msgspec.structs.replace(s, host=h.address) for h in good for s in studies]
    with _cluster(good) as client:
        yield from _dealt(client, hosts, asked, tell)


def _import() -> None:
    try:
        import asyncssh  # noqa: F401
        import distributed  # noqa: F401
    except ImportError as error:
        raise StudyError("--hosts", f"needs Dask and asyncssh ({error})", INSTALL) from error


async def _reasons(hosts: Hosts) -> list[str]:
    return list(await asyncio.gather(*(_unfit(host, hosts) for host in hosts.host)))


async def _unfit(host: Host, hosts: Hosts) -> str:
    """Why a host cannot be used; "" if it can."""
    try:
        async with asyncio.timeout(PATIENCE_S), _called(host, hosts, f'-c "{SPEAKS}"') as process:
            errors = asyncio.create_task(_last_words(process.stderr))
            said = await _last_words(process.stdout, MOST_SAID)
            why = "" if said else await errors
    except LostError as error:
        return f"not reached ({error})"
    except TimeoutError:
        return f"not reached (no answer in {PATIENCE_S:g} s)"
    if not said:
        return f"{host.python} does not know this project ({why}); there: {INSTALL}"
    if said != fleet_host.READY:
        return f"speaks {said!r} and this machine {fleet_host.READY!r}: install the same lock file"
    return ""


@asynccontextmanager
async def _called(host: Host, hosts: Hosts, arguments: str) -> AsyncIterator[Any]:
    """A Python of a host, over SSH. LostError where it cannot be reached, or the connection breaks."""
    import asyncssh

    options: dict[str, Any] = {"agent_forwarding": False, "keepalive_interval": SIGN_OF_LIFE_S}
    if hosts.ssh_config:
        options["config"] = [str(expanded(hosts.ssh_config))]
    try:
        async with (
            asyncssh.connect(host.address, **options) as connection,
            connection.create_process(f"{host.python} -P {arguments}", encoding=None) as process,
        ):
            yield process
    except (OSError, ValueError, asyncssh.Error, EOFError, RuntimeError) as error:
        # an IncompleteReadError is an EOFError; a RuntimeError: an unknown home, or a file that includes itself
        raise LostError(str(error) or type(error).__name__) from error


async def _last_words(stream: Any, most: float = math.inf) -> str:
    """The end of a host's output, safe to print; read to its end, or until it exceeds `most` bytes."""
    said, n = b"", 0
    while n <= most and (piece := await stream.read(MOST_SAID)):
        said, n = (said + piece)[-MOST_SAID:], n + len(piece)
    return plain(" ".join(said.decode(errors="replace").split()))


@contextmanager
def _cluster(hosts: Collection[Host]) -> Iterator[Any]:
    """A client of a scheduler in this process, with a worker for every host."""
    import dask
    from distributed import Client, Scheduler, SpecCluster, Worker

    workers = {
        host.address: {
            "cls": Worker,
            "options": {"name": host.address, "nthreads": 1, "resources": {ONE: 1, host.address: 1}, "memory_limit": 0,
                        **HERE},
        }
        for host in hosts
    }  # fmt: skip
    patient = {"scheduler": {"allowed-failures": len(workers)}}
    ours = dask.config.merge(dask.config.get("distributed"), SETTINGS, patient)
    with ExitStack() as stack:
        stack.enter_context(dask.config.set({"distributed": ours}))
        spec = {"cls": Scheduler, "options": HERE}
        cluster = stack.enter_context(SpecCluster(workers, spec, silence_logs=LOUD))
        yield stack.enter_context(Client(cluster))


def _alive(client: Any) -> set[str]:
    workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"].values()
    return {str(worker["name"]) for worker in workers}


def _dealt(client: Any, hosts: Hosts, tasks: Sequence[Asked], tell: Tell) -> Iterator[Outcome]:
    """Give every host one study at a time. Rows arrive as events, in order; task results are empty."""
    came: SimpleQueue[Came] = SimpleQueue()
    client.subscribe_topic(ROWS, lambda event: came.put(event[1]))
    waiting, left, by = deque(tasks), dict[Any, Asked](), dict[str, str]()
    while waiting or left:
        alive = _alive(client)
        while waiting and (waiting[0].host or len(left) < max(len(alive), 1)):
            asked = waiting.popleft()
            wanted = {ONE: 1} | ({asked.host: 1} if asked.host else {})
            left[client.submit(_measured, hosts, asked, key=f"{asked}", resources=wanted)] = asked
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
    """File arrived rows, waiting up to LOOK_S for the first; yield an outcome for each pack that cannot be filed."""
    seconds = LOOK_S
    with suppress(Empty):
        while True:
            host, what, packed = came.get(timeout=seconds)
            seconds, by[what] = 0.0, host
            try:
                tell(host, packs.add(packed, registry.STUDIES)[1])
            except StudyError as error:
                yield Outcome(what, host, f"sent what cannot be filed: {error}")


async def _measured(hosts: Hosts, asked: Asked) -> None:
    """In a host's worker here: let the host measure, and pass on its rows. The worker closes if its host is lost."""
    from distributed import get_worker

    worker = get_worker()
    host = next(host for host in hosts.host if host.address == worker.name)
    try:
        async with _called(host, hosts, f"-m {fleet_host.__name__}") as process:
            process.stdin.write(msgspec.json.encode(asked) + b"\n")
            errors, room = asyncio.create_task(_last_words(process.stderr)), packs.MOST_BYTES
            while head := await process.stdout.read(1):
                (size,) = SIZE.unpack(head + await process.stdout.readexactly(SIZE.size - 1))
                room -= size
                if room < 0:  # more than any study's rows
                    raise LostError
                worker.log_event(ROWS, (worker.name, f"{asked}", await process.stdout.readexactly(size)))
            why = await errors
            await process.wait_closed()
        if process.exit_status == 1:
            raise RuntimeError(why)
        if process.exit_status != 0:
            raise LostError
    except LostError:
        worker.loop.add_callback(worker.close, executor_wait=False)
        await asyncio.Event().wait()  # until this ends with the worker; Dask gives the study to another
