"""Several machines at once: hosts behind a real SSH server on this machine, each with a tree of its own."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pytest

from plamo_study import paths
from plamo_study.errors import StudyError
from plamo_study.measure import journal
from plamo_study.studies import fleet

pytestmark = pytest.mark.timeout(600)  # both hosts are this machine, and tests beside them have a core of it
asyncssh = pytest.importorskip("asyncssh")
pytest.importorskip("distributed")
fleet.LOOK_S = 0.2
T = TypeVar("T")
GATES, TRACE = fleet.Asked("00-gates", "mini", 0), fleet.Asked("02-trace", "mini", 0.02)


class Served:
    """An SSH server that runs what it is asked to, for whoever has the key."""

    def __init__(self, folder: Path):
        self.folder, self.port, self.loop = folder, 0, asyncio.new_event_loop()
        self.user, self.own = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
        self.user.write_private_key(folder / "key")
        self.user.write_public_key(folder / "authorized")
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.began = threading.Event()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.create_task(self._listen())
        self.loop.run_forever()

    async def _listen(self) -> None:
        server = await asyncssh.listen(
            "127.0.0.1", 0, server_host_keys=[self.own], process_factory=self._work,
            authorized_client_keys=str(self.folder / "authorized"),
        )  # fmt: skip
        self.port = server.get_port()
        self.began.set()

    async def _work(self, process: "asyncssh.SSHServerProcess") -> None:
        pipe = subprocess.PIPE
        child = subprocess.Popen(process.command or "", shell=True, stdin=pipe, stdout=pipe, stderr=pipe)
        await process.redirect(stdin=child.stdin, stdout=child.stdout, stderr=child.stderr)
        code = await self.loop.run_in_executor(None, child.wait)
        await process.stdout.drain()
        process.exit(code)

    def __enter__(self) -> "Served":
        self.thread.start()
        assert self.began.wait(10)
        public = self.own.export_public_key().decode().strip()
        (self.folder / "known").write_text(f"[127.0.0.1]:{self.port} {public}\n")
        (self.folder / "config").write_text(
            f"Host one two\n  HostName 127.0.0.1\n  Port {self.port}\n  IdentityFile {self.folder}/key\n"
            f"  UserKnownHostsFile {self.folder}/known\n"
        )
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fleet.Hosts]:
    """Two hosts of which each measures into a tree of its own; what comes home is filed in a third."""
    monkeypatch.setattr(paths, "MEASURED", tmp_path / "home")
    with Served(tmp_path) as served:
        found = [fleet.Host(name, f"env PLAMO_STUDY_ROOT={_tree(tmp_path / name)} {sys.executable}") for name in NAMES]
        yield fleet.Hosts(tuple(found), "127.0.0.1", str(served.folder / "config"))
    assert not _left(_workers), "no worker is left"


NAMES = ("one", "two")


def _left(look: Callable[[], list[T]]) -> list[T]:
    """What is still there after it had 20 s to end."""
    until = time.monotonic() + 20
    while (found := look()) and time.monotonic() < until:
        time.sleep(0.1)
    return found


def _tree(folder: Path) -> Path:
    """What a clone has, but for the rows."""
    (folder / "data").mkdir(parents=True)
    for path in paths.DATA.iterdir():
        if path.name != "measured":
            (folder / "data" / path.name).symlink_to(path)
    return folder


def _workers() -> list[psutil.Process]:
    """The workers that hosts run: processes of this machine here."""
    return [each for each in psutil.Process().children(recursive=True) if "distributed.cli.dask_spec" in _line(each)]


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) if process.name().startswith("python") else ""
    except psutil.Error:
        return ""


def _keys(folder: Path) -> list[str]:
    rows = [journal.latest_rows(journal.read(path)) for path in sorted(folder.rglob("*.jsonl"))]
    return [row.key for each in rows for row in each]


def _raw_keys(folder: Path) -> list[str]:
    """Of every line that is a row, so that one written twice is there twice."""
    lines = [msgspec.json.decode(line) for path in folder.rglob("*.jsonl") for line in path.read_bytes().splitlines()]
    return [line["key"] for line in lines if line["kind"] == "row"]


def test_every_host_measures_and_its_rows_come_home_once(hosts: fleet.Hosts, tmp_path: Path) -> None:
    came: list[str] = []
    outcomes = list(fleet.measure(hosts, [GATES], False, lambda host, new: came.extend([host] * new)))
    assert [(outcome.host, outcome.wrong) for outcome in sorted(outcomes, key=str)] == [("one", ""), ("two", "")]
    measured = [_keys(tmp_path / name / "data" / "measured") for name in NAMES]
    assert measured[0]
    assert set(measured[0]) | set(measured[1]) == set(_keys(tmp_path / "home"))
    assert len(_raw_keys(tmp_path / "home")) == len(set(_raw_keys(tmp_path / "home"))) == len(came)


def test_what_a_killed_host_was_measuring_is_measured_by_another(hosts: fleet.Hosts, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(host: str, new: int) -> None:
        """When the first row came home: the worker that sent it, as a host whose power fails."""
        if not killed:
            worker = next(each for each in _workers() if f'"{host}"' in _line(each))
            killed.append(worker.pid)
            worker.send_signal(signal.SIGKILL)

    outcomes = list(fleet.measure(hosts, [TRACE, GATES], True, kill))
    assert killed
    assert len(outcomes) == 2
    assert not [outcome.wrong for outcome in outcomes if outcome.wrong]
    assert len({outcome.host for outcome in outcomes}) == 1, "the one that is left"
    keys = _raw_keys(tmp_path / "home")
    assert len(keys) == len(set(keys))


def test_a_host_that_is_lost_or_was_never_there_is_named_and_the_others_measure(
    hosts: fleet.Hosts, tmp_path: Path
) -> None:
    more = msgspec.structs.replace(hosts, host=(*hosts.host, fleet.Host("127.0.0.1", "python")))
    killed: list[int] = []
    gone: list[bool] = []

    def kill(host: str, new: int) -> None:
        if host == "two" and not killed:
            killed.extend(worker.pid for worker in _workers() if '"two"' in _line(worker))
            psutil.Process(killed[0]).kill()
            gone.append(not _left(lambda: _measuring(tmp_path / "two")))

    outcomes = {outcome.host: outcome.wrong for outcome in fleet.measure(more, [GATES], False, kill)}
    assert killed
    assert outcomes["one"] == ""
    assert "lost" in outcomes["two"]
    assert "not reached" in outcomes["127.0.0.1"]
    assert gone == [True], "what the lost host was measuring ends with it"


def _measuring(folder: Path) -> list[str]:
    """Processes that measure a cell, whoever started them: their working tree is that of a host."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PLAMO_STUDY_ROOT", "").startswith(str(folder)):
                found.append(f"{process.pid} {_line(process)}")
        except psutil.Error:
            continue
    return found


def test_another_version_on_a_host_is_refused(hosts: fleet.Hosts) -> None:
    other = msgspec.structs.replace(hosts, host=(fleet.Host("one", "echo plamo-study 3.9 #"),))
    with pytest.raises(StudyError, match=r"can be used.*speaks.*same lock file"):
        list(fleet.measure(other, [GATES], False, lambda *_: None))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "names no host|is no list"),
        ("host = 3", "is no list of hosts"),
        ('[[host]]\naddress = "a"', "missing required field `python`"),
        ('[[host]]\naddress = "a"\npython = "p"\npassword = "x"', "unknown field `password`"),
        ('[[host]]\naddress = "a"\npython = "p"\n' * 2, "twice"),
        ("[[host", "is no list of hosts"),
    ],
)
def test_a_file_that_is_no_list_of_hosts_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    with pytest.raises(StudyError, match=why):
        fleet.read(path)


def test_a_file_of_hosts_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="is no list of hosts"):
        fleet.read(tmp_path / "none.toml")
