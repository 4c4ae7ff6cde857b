"""Several machines at once: hosts behind a real SSH server on this machine, each with a tree of its own."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest

from llama_meter import journal, paths
from llama_meter.disk import plain
from llama_meter.errors import StudyError
from plamo_study.run import fleet, fleet_host

pytestmark = pytest.mark.timeout(600)  # both hosts are this machine, and tests beside them have a core of it
fleet.LOOK_S = 0.2
T = TypeVar("T")
GATES, TRACE = fleet.Asked("00-gates", "mini", 0), fleet.Asked("02-trace", "mini", 0.2)


class Served:
    """An SSH server that runs what it is asked to, for whoever has the key."""

    def __init__(self, folder: Path):
        self.folder, self.port, self.loop = folder, 0, asyncio.new_event_loop()
        self.ssh = pytest.importorskip("asyncssh")  # loaded here: every process of the tests reads this file
        self.user, self.own = (self.ssh.generate_private_key("ssh-ed25519") for _ in range(2))
        self.user.write_private_key(folder / "key")
        self.user.write_public_key(folder / "authorized")
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.began = threading.Event()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.create_task(self._listen())
        self.loop.run_forever()

    async def _listen(self) -> None:
        server = await self.ssh.listen(
            "127.0.0.1", 0, server_host_keys=[self.own], process_factory=self._work,
            authorized_client_keys=str(self.folder / "authorized"), encoding=None,
        )  # fmt: skip
        self.port = server.get_port()
        self.began.set()

    async def _work(self, process: Any) -> None:
        pipe = subprocess.PIPE
        child = subprocess.Popen(process.command or "", shell=True, stdin=pipe, stdout=pipe, stderr=pipe)
        await process.redirect(stdin=child.stdin, stdout=child.stdout, stderr=child.stderr)
        code = await self.loop.run_in_executor(None, child.wait)
        await process.stdout.drain()
        process.exit(code) if code >= 0 else process.exit_with_signal(signal.Signals(-code).name[3:])

    def __enter__(self) -> "Served":
        self.thread.start()
        assert self.began.wait(10)
        public = self.own.export_public_key().decode().strip()
        (self.folder / "known").write_text(f"[127.0.0.1]:{self.port} {public}\n")
        (self.folder / "config").write_text(
            f"Host one two evil* endless\n  HostName 127.0.0.1\n  Port {self.port}\n  IdentityFile {self.folder}/key\n"
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
    pytest.importorskip("distributed")
    monkeypatch.setattr(paths, "MEASURED", tmp_path / "home")
    with Served(tmp_path) as served:
        found = [fleet.Host(name, f"env PLAMO_STUDY_ROOT={_tree(tmp_path / name)} {sys.executable}") for name in NAMES]
        yield fleet.Hosts(tuple(found), str(served.folder / "config"))
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


def _workers(host: str = "") -> list[psutil.Process]:
    """What measures on the hosts, or on one: processes of this machine here."""
    every = [each for each in psutil.Process().children(recursive=True) if "run.fleet_host" in _line(each)]
    return [each for each in every if each.environ()["PLAMO_STUDY_ROOT"].endswith(f"/{host}") or not host]


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


@pytest.mark.whole
def test_what_a_killed_host_was_measuring_is_measured_by_another(hosts: fleet.Hosts, tmp_path: Path) -> None:
    killed: list[str] = []

    def kill(host: str, new: int) -> None:
        """When the first row came home: the worker that sent it, as a host whose power fails."""
        if not killed:
            killed.append(host)
            min(_workers(host), key=lambda each: each.create_time()).kill()

    outcomes = list(fleet.measure(hosts, [TRACE, GATES], True, kill))
    assert len(outcomes) == 2
    assert not [outcome.wrong for outcome in outcomes if "lost" in outcome.wrong], "disturbed it may be, beside others"
    measured = {outcome.host for outcome in outcomes} - {""}  # nobody's, where the time was too short for a row
    assert measured == {*NAMES} - {*killed}, "the one that is left"
    keys = _raw_keys(tmp_path / "home")
    assert len(keys) == len(set(keys))


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


INTRUDER = """
import asyncio, os, sys
from contextlib import suppress
from distributed import Client

async def call(port):
    with suppress(OSError):
        async with Client(f"tcp://127.0.0.1:{port}", timeout=6, asynchronous=True) as client:
            print(await client.run_on_scheduler(os.getpid), flush=True)

async def call_each():
    await asyncio.wait([asyncio.create_task(call(port)) for port in sys.argv[1:]], timeout=6)
    os._exit(0)  # who speaks something else may never answer

asyncio.run(call_each())
"""


def _intruded(ports: list[int]) -> list[str]:
    """What a Dask client runs in whoever listens at these ports: the number of that process, where it can."""
    command = [sys.executable, "-c", INTRUDER, *map(str, ports)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout.split()


@pytest.mark.whole
def test_rows_come_home_once_a_lost_host_and_one_that_was_never_there_are_named_and_nothing_here_can_be_called(
    hosts: fleet.Hosts, tmp_path: Path
) -> None:
    """What a Dask scheduler is sent it runs, in this process, which may hold the user's tokens."""
    from distributed import LocalCluster

    more = msgspec.structs.replace(hosts, host=(*hosts.host, fleet.Host("127.0.0.1", "python")))
    came: list[str] = []
    left: list[list[str]] = []
    heard: list[list[str]] = []

    def look(host: str, new: int) -> None:
        """When the first row of host two came home: it is killed, and this process called."""
        came.extend([host] * new)
        if host == "two" and not heard:
            min(_workers("two"), key=lambda each: each.create_time()).kill()  # a child may not have begun its own
            left.append(_left(lambda: _measuring(tmp_path / "two")))
            own = psutil.Process().net_connections("tcp4")
            heard.append(_intruded([each.laddr.port for each in own if each.status == psutil.CONN_LISTEN]))

    outcomes = {outcome.host: outcome.wrong for outcome in fleet.measure(more, [GATES], False, look)}
    assert outcomes["one"] == ""
    assert "lost" in outcomes["two"]
    assert "not reached" in outcomes["127.0.0.1"]
    assert left == [[]], "what the lost host was measuring ends with it"
    assert heard == [[]]
    one, two = (set(_keys(tmp_path / name / "data" / "measured")) for name in NAMES)
    assert one
    assert one <= set(_keys(tmp_path / "home")) <= one | two
    assert len(_raw_keys(tmp_path / "home")) == len(set(_raw_keys(tmp_path / "home"))) == len(came)
    quiet = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "processes": False, "n_workers": 0}
    with LocalCluster(protocol="tcp://", **quiet) as cluster:
        assert _intruded([cluster.scheduler.port]) == [str(os.getpid())], "one that can be called is"


EVIL = """
import os, pickle, struct, sys
class Run:
    def __reduce__(self): return os.system, ("touch {ran}",)
out = sys.stdout.buffer
if "-c" in sys.argv:
    {greets}
    sys.exit()
pack = pickle.dumps(Run())
{does}
out.flush()
"""
GREETS = f"print({fleet_host.READY!r})"
DOES = {  # what a host does that was asked to measure; what becomes of it
    "sends a pickle": ("out.write(struct.pack('>I', len(pack)) + pack)", "cannot be filed"),
    "announces gigabytes": ("out.write(b'\\xff' * 4)\nout.flush()\nsys.stdin.read()", "lost"),
    "sends packs for ever": ("while True: out.write(struct.pack('>I', 1 << 25) + bytes(1 << 25))", "lost"),
    "hangs up in the middle": ("out.write(struct.pack('>I', 1000) + b'short')", "lost"),
    "complains for ever": ("for _ in range(999): sys.stderr.write('no \\x1b[31m' * 9999)\nsys.exit(1)", r"no \x1b[31m"),
}


@pytest.mark.long
def test_what_a_host_sends_is_never_run_and_never_without_end(hosts: fleet.Hosts, tmp_path: Path) -> None:
    evil = []
    for number, (does, _) in enumerate(DOES.values()):
        path = tmp_path / f"evil{number}.py"
        path.write_text(EVIL.format(ran=tmp_path / "ran", greets=GREETS, does=does))
        evil.append(fleet.Host(f"evil{number}", f"{sys.executable} {path}"))
    path = tmp_path / "endless.py"
    path.write_text(EVIL.format(ran=tmp_path / "ran", does="", greets="while True: print('x' * 9999)"))
    every = msgspec.structs.replace(hosts, host=(*evil, fleet.Host("endless", f"{sys.executable} {path}")))
    before = psutil.Process().memory_info().rss
    found: dict[str, str] = {}
    for outcome in fleet.measure(every, [GATES], False, lambda *_: None):
        found[outcome.host] = found.get(outcome.host, "") + outcome.wrong
    assert psutil.Process().memory_info().rss < before + (1 << 29)
    assert not (tmp_path / "ran").exists()
    for number, (_, why) in enumerate(DOES.values()):
        assert why in found[f"evil{number}"], found
    assert "speaks" in found["endless"]
    assert all(wrong == plain(wrong) for wrong in found.values()), "no terminal obeys it"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "names no host|is no list"),
        ('[[host]]\naddress = "a"\npython = "p"\npassword = "x"', "unknown field `password`"),
        ('[[host]]\naddress = "a"\npython = "p"\n' * 2, "twice"),
        ("[[host", "is no TOML"),
        (None, "hosts.toml"),
    ],
)
def test_a_file_that_is_no_list_of_hosts_or_is_not_there_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "hosts.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(StudyError, match=why):
        fleet.read(path)


HOST = '[[host]]\naddress = "mac.local"\npython = "python"\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('ssh_config = "/dev/zero"\n' + HOST, "no regular file"),
        ('ssh_config = "~nobody-of-this-name/config"\n' + HOST, "no home folder"),
        ('ssh_config = "config"\n' + HOST, "/dev/zero: is no regular file"),
        (".".join("a" * 16_000) + " = 1\n" + HOST, "more than 64 dots"),
        (("[" + ".".join("a" * 60) + "]\n" + "b = 1\n") * 2000, "more than 65,536"),
        (HOST + "a = " + "[" * 5000 + "]" * 5000, "is no TOML"),
    ],
    ids=["an endless configuration", "no such home", "endless known hosts", "nested keys", "many keys", "nested lists"],
)
def test_a_file_of_hosts_and_what_it_names_is_read_within_limits(tmp_path, monkeypatch, text: str, why: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").write_text("Host *\n  IdentityFile /dev/null\n  UserKnownHostsFile = /dev/zero\n")
    (tmp_path / "hosts.toml").write_text(text)
    tracemalloc.start()
    with pytest.raises(StudyError, match=why):
        fleet.read(tmp_path / "hosts.toml")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20


def test_a_configuration_of_ssh_that_includes_itself_loses_only_its_host(tmp_path, monkeypatch) -> None:
    pytest.importorskip("asyncssh")
    (tmp_path / "config").write_text(f"Include {tmp_path}/config\n")
    hosts = fleet.Hosts((fleet.Host("localhost", "python"),), str(tmp_path / "config"))
    with pytest.raises(StudyError, match="no host: can be used"):
        list(fleet.measure(hosts, [GATES], divided=True, tell=lambda host, rows: None))
