"""Released files from a hub on loopback, through the real client: what comes is whole and verified, or a message.

Where the environment matters the fetch runs in a process of its own.
"""

import errno
import fcntl
import gzip
import hashlib
import json
import math
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import tracemalloc
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hub import Refusal, files_of, serve
from huggingface_hub import constants, file_download

from llama_meter import http, paths
from llama_meter.errors import StudyError
from llama_meter.measure import plan
from llama_meter.models import fetch as fetching, inventory, registry, snapshots, synthetic, transfer
from llama_meter.models.fetch import fetch

MODEL, WEIGHTS = "plamo-2-1b", "model.safetensors"
TOKEN = "hf_planted000000000000000000000000secret"
KEPT = 10 << 20  # the client writes pieces of this size
LARGE = random.Random(4).randbytes(25_000_000)
SMALL = {
    "config.json": b'{"model_type": "plamo2"}',
    WEIGHTS: random.Random(5).randbytes(70_000),
    "tokenizer.jsonl": b'["a", 0.0, "NORMAL"]\n' * 100,
    "tokenizer_config.json": b"{}",
    "README.md": b"# A model",
    "LICENSE": b"Apache-2.0",
}
BYTES = sum(map(len, SMALL.values()))
NOT_WANTED = {
    "modeling_plamo.py": b"raise SystemExit('remote code')",
    "pytorch_model.bin": b"pickle",
    "sub/model.safetensors": b"in a folder",
    "../../evil.safetensors": b"outside",
    ".hidden.safetensors": b"hidden",
    "/tmp/evil.safetensors": b"elsewhere",
}
TOML = paths.MODELS_TOML.read_text()
LOAD = registry.load.__wrapped__  # without its cache

CHILD = """
import json, sys
seen = set()
def look(event, args):
    if event == "socket.connect": seen.add(str(args[1][0]) if isinstance(args[1], tuple) else "unix")
    if event in ("socket.getaddrinfo", "socket.gethostbyname"): seen.add(str(args[0]))
sys.addaudithook(look)
from llama_meter.models.fetch import fetch
print(fetch("plamo-2-1b"))
print(json.dumps(sorted(seen)))
"""


@pytest.fixture
def hub():
    with serve(SMALL | NOT_WANTED) as hub:
        yield hub


@pytest.fixture
def project(tmp_path, monkeypatch, hub):
    """A project folder of its own, whose hub is the one on loopback, and nobody's token."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("PLAMO_STUDY_ROOT", str(tmp_path))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "home/token"))
    monkeypatch.setattr(paths, "MODELS", tmp_path / "data/models")
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda s: None))
    (tmp_path / "data").mkdir()
    pin(tmp_path, monkeypatch, "")
    return tmp_path


def pin(project, monkeypatch, pins):
    """Write the registry of the project, with these lines in the hub's table."""
    toml = project / "data/models.toml"
    toml.write_text(TOML.replace(f"[models.{MODEL}.hub]\n", f"[models.{MODEL}.hub]\n{pins}\n"))
    monkeypatch.setattr(registry, "load", lambda: LOAD(toml))


def pinned(hub, **wrong):
    """The lines that pin what the hub has, with these hashes instead."""
    hashes = {name: sha256(body) for name, body in SMALL.items()} | wrong
    listed = ", ".join(f'"{name}" = "{digest}"' for name, digest in hashes.items())
    return f'revision = "{commit(hub)}"\nsha256 = {{ {listed} }}'


def child(**environment):
    command = [sys.executable, "-c", CHILD]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=os.environ | environment, **pipes)


def sha256(body):
    return hashlib.sha256(body).hexdigest()


def left(project):
    """Everything below the project's models, by name."""
    root = project / "data/models"
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def commit(hub):
    return hub.branches["main"]


def whole(hub):
    """What is left of a complete download."""
    return sorted(f"hub/{MODEL}/{commit(hub)}/{name}" for name in (*SMALL, snapshots.RECORD))


def refused(said, **arguments):
    with pytest.raises(StudyError, match=f"(?s){said}") as caught:
        fetch(MODEL, **arguments)
    return caught.value


# ---------------------------------------------------------------- what comes


def test_what_is_needed_comes_verified_is_recorded_and_can_be_pinned(project, hub, monkeypatch):
    folder = fetch(MODEL)
    assert folder == project / "data/models/hub" / MODEL / commit(hub)
    assert files_of(folder).items() >= SMALL.items()
    assert left(project) == whole(hub)
    record = json.loads((folder / snapshots.RECORD).read_text())
    assert (record["revision"], record["asked"], record["repository"]) == (commit(hub), "main", hub.repository)
    assert {name: file["sha256"] for name, file in record["files"].items()} == {n: sha256(b) for n, b in SMALL.items()}
    hub.stopped, asked, calls = True, len(hub.requests), []
    assert fetch(MODEL, lambda *call: calls.append(call)) == folder
    assert calls[-1] == (BYTES, BYTES), "verified, and nobody asked"
    text = snapshots.toml(MODEL, snapshots.find(MODEL, None))
    assert tomllib.loads(text)["models"][MODEL]["hub"] == tomllib.loads(pinned(hub))
    pin(project, monkeypatch, pinned(hub))
    assert fetch(MODEL, offline=True) == folder
    assert len(hub.requests) == asked
    refused("cannot be reached", revision="main")


def test_an_unpinned_model_stays_what_it_was_until_another_revision_is_named(project, hub, monkeypatch):
    first = fetch(MODEL)
    moved = hub.publish(SMALL | {"README.md": b"# Retrained"})
    assert fetch(MODEL) == first
    assert fetch(MODEL, revision="main").name == moved
    assert fetch(MODEL, revision=first.name) == first
    assert fetch(MODEL, offline=True, revision="main").name == moved
    pin(project, monkeypatch, f'revision = "{first.name}"')
    assert fetch(MODEL) == first


def test_the_token_goes_to_the_hub_only_nothing_leaves_loopback_and_no_message_shows_it(project, hub):
    for refusals in (("/api/", 401), ("/storage/", 500), None):
        shutil.rmtree(project / "data/models", ignore_errors=True)
        hub.requests.clear()
        hub.refusals = [Refusal(*refusals, "", "you sent {token}")] if refusals else []
        process = child(HF_TOKEN=TOKEN, HF_DEBUG="1", HF_HUB_VERBOSITY="debug")
        said = process.communicate(timeout=60)[0]
        assert process.returncode == (1 if refusals else 0)
        assert ("StudyError" in said) == bool(refusals)
        assert TOKEN not in said
    assert json.loads(said.splitlines()[-1]) == ["127.0.0.1"]
    assert {("storage" in request.path, request.token) for request in hub.requests} == {
        (False, f"Bearer {TOKEN}"),
        (True, ""),
    }
    assert len(hub.requests) == 1 + len(SMALL) + 1, "one list, one request a file, one redirect"


# ---------------------------------------------------------------- cuts


@pytest.mark.parametrize("reset", [False, True], ids=["ended", "reset"])
def test_a_download_cut_at_random_points_resumes_to_the_right_hash(project, hub, reset):
    hub.publish(SMALL | {WEIGHTS: LARGE})
    draw, calls = random.Random(f"cuts {reset}"), []
    hub.reset, hub.cuts = reset, [draw.randrange(1, KEPT), draw.randrange(18_000_000, 24_000_000), 0]
    folder = fetch(MODEL, lambda *call: calls.append(call))
    assert sha256((folder / WEIGHTS).read_bytes()) == sha256(LARGE)
    starts = [request.start for request in hub.requests if "storage" in request.path]
    assert (len(starts), max(starts) >= KEPT) == (4, True), "cut three times, resumed, not begun anew"
    total = BYTES - len(SMALL[WEIGHTS]) + len(LARGE)
    assert calls[-1] == max(calls) == (total, total)


def test_a_killed_fetch_leaves_nothing_that_counts_and_the_next_one_resumes(project, hub):
    hub.publish(SMALL | {WEIGHTS: LARGE})
    hub.stalls = [21 << 20]
    process = child()
    assert hub.stalled.wait(30)
    growing = project / "data/models/hub" / MODEL / f"{commit(hub)}.partial" / f"{WEIGHTS}.partial"
    while growing.stat().st_size < 2 * KEPT:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    hub.go_on.set()
    assert snapshots.held(MODEL) == []
    refused("not here", offline=True)
    assert sha256((fetch(MODEL) / WEIGHTS).read_bytes()) == sha256(LARGE)
    assert [request.start for request in hub.requests if "storage" in request.path] == [0, 2 * KEPT]
    assert left(project) == whole(hub)


def test_a_server_that_falls_silent_is_asked_again_and_one_that_keeps_resetting_given_up(project, hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    hub.reset, hub.cuts = True, [100] * 20
    refused("stopped answering.*resumes")
    assert snapshots.held(MODEL) == []
    hub.reset, hub.cuts, hub.stalls = False, [], [30_000]
    assert files_of(fetch(MODEL))[WEIGHTS] == SMALL[WEIGHTS]


# ---------------------------------------------------------------- corrupt and untrue


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
@pytest.mark.parametrize("change", [lambda body: b"!" + body[1:], lambda body: body[:-3], lambda body: body + LARGE])
def test_a_corrupted_body_is_refused_not_kept_and_not_read_beyond_its_end(project, hub, name, change):
    hub.replaced[name] = change(SMALL[name])
    refused(rf"{name}.*not kept")
    assert hub.sent < len(LARGE)
    assert not any(f"/{name}" in path for path in left(project))
    assert snapshots.held(MODEL) == []
    hub.replaced.clear()
    assert files_of(fetch(MODEL))[name] == SMALL[name]


def test_a_file_that_rots_on_disk_is_named_offline_and_brought_again_online(project, hub):
    folder = fetch(MODEL)
    (folder / WEIGHTS).write_bytes(SMALL[WEIGHTS][:-1] + b"!")
    refused(r"model\.safetensors: has SHA-256", offline=True)
    (folder / "README.md").unlink()
    refused(r"README\.md: is missing", offline=True)
    before = len(hub.paths("/resolve/"))
    assert files_of(fetch(MODEL)).items() >= SMALL.items()
    assert {path.rsplit("/", 1)[1] for path in hub.paths("/resolve/")[before:]} == {WEIGHTS, "README.md"}


def test_what_was_recorded_binds_the_hub_also_after_a_repair_that_fails(project, hub):
    (fetch(MODEL) / WEIGHTS).unlink()
    hub.refusals = [Refusal("/storage/", 503)]
    refused("answered 503")
    hub.refusals, hub.announced[WEIGHTS] = [], sha256(b"swapped")
    refused("recorded.*nothing was downloaded")


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_pin_that_does_not_hold_is_refused(project, hub, monkeypatch, name):
    pin(project, monkeypatch, pinned(hub, **{name: "0" * 64}))
    refused(rf"{name}.*SHA-256")
    assert not any(f"/{name}" in path for path in left(project))
    assert not hub.paths("storage"), "a hash that the hub announces is compared before the download"


def test_only_pinned_files_come_and_one_that_the_repository_lacks_is_named(project, hub, monkeypatch):
    pin(project, monkeypatch, pinned(hub, **{"gone.safetensors": "0" * 64}))
    refused(r"gone\.safetensors: is pinned")
    pin(project, monkeypatch, pinned(hub))
    hub.commits[commit(hub)]["model-2.safetensors"] = b"not pinned"
    assert files_of(fetch(MODEL)).keys() == {*SMALL, snapshots.RECORD}


def test_a_pin_that_cannot_be_one_is_refused_with_the_registry(project, monkeypatch):
    for pins in ('revision = "main"', 'sha256 = { a = "00" }', f'revision = "{"0" * 40}x"'):
        pin(project, monkeypatch, pins)
        refused(r"models\.plamo-2-1b")


def test_a_damaged_record_is_named(project):
    folder = fetch(MODEL)
    (folder / snapshots.RECORD).write_text('{"files": {"../../../x": {"size": 1, "sha256": ""}}}')
    refused(r"fetched\.json: is damaged")


# ---------------------------------------------------------------- refusals

REFUSALS = {
    "gated, no token": (Refusal("/resolve/", 401, "GatedRepo"), "", "Apache-2.0.*no token.*accept its terms at"),
    "gated, token": (Refusal("/resolve/", 403, "GatedRepo"), TOKEN, "gated.*account.*accept its terms at"),
    "bad token": (Refusal("/api/", 401, "", "Invalid credentials in Authorization header"), TOKEN, "token.*HF_TOKEN"),
    "no token": (Refusal("/resolve/", 401), "", "wants a token.*HF_TOKEN"),
    "forbidden": (Refusal("/storage/", 403), TOKEN, "403.*HF_TOKEN"),
    "no repository": (Refusal("/api/", 404, "RepoNotFound"), "", "not on the hub.*models.toml.*HF_TOKEN"),
    "no revision": (Refusal("/api/", 404, "RevisionNotFound"), "", "no revision 'main'.*branch"),
    "no file": (Refusal("/resolve/", 404, "EntryNotFound"), "", "file that it listed.*once more"),
    "disabled": (Refusal("/api/", 403, "", "Access to this resource is disabled."), "", "disabled"),
    "too often": (Refusal("/api/", 429), "", "429.*wait.*HF_TOKEN"),
    "away": (Refusal("/storage/", 503), "", "answered 503.*resumes"),
    "login page": (Refusal("/api/", 200, body="<html>Log in</html>"), "", "no hub gives.*login"),
    "other JSON": (Refusal("/api/", 200, body='{"id": "x"}'), "", "no hub gives"),
}


@pytest.mark.parametrize(("refusal", "token", "said"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_says_what_to_accept_or_set(project, hub, monkeypatch, refusal, token, said):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.refusals = [refusal]
    error = refused(said)
    assert TOKEN not in str(error)
    assert error.__suppress_context__, "the cause may quote the server"
    assert all(".partial/" in path for path in left(project)), "what came before stays unfinished"


def test_a_hub_that_cannot_be_reached_or_never_answers_is_named(project, monkeypatch):
    monkeypatch.setattr(fetching, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for endpoint in (f"http://127.0.0.1:{silent.getsockname()[1]}", "http://127.0.0.1:9", "not a url", "ftp://x"):
            monkeypatch.setenv("HF_ENDPOINT", endpoint)
            refused("cannot be reached or stopped.*HF_ENDPOINT.*--offline")


@pytest.mark.parametrize("where", ["/api/", "/storage/"])
def test_a_hub_that_goes_on_without_end_is_left(project, hub, where):
    hub.endless = where
    tracemalloc.start()
    refused("says more than")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * http.MOST_TOLD


@pytest.mark.parametrize("where", ["/api/", "/resolve/", "/storage/"])
def test_a_hub_that_drips_is_left(project, hub, monkeypatch, where):
    monkeypatch.setattr(http, "LEAST_S", 0.1)
    hub.drip = where
    hub.publish({name: body * 20 for name, body in SMALL.items()})
    refused("bytes in .* s, less than")


@pytest.mark.long
@pytest.mark.parametrize("where", ["/api/", "/resolve/", "/storage/"])
@pytest.mark.parametrize(("pause_s", "said"), [(0.0, "bytes and no answer among them"), (0.01, "no answer in 0 s")])
def test_a_hub_that_only_informs_is_left(project, hub, monkeypatch, where, pause_s, said):
    if pause_s:
        monkeypatch.setattr(http, "LEAST_S", 0.1)
    hub.informs, hub.pause_s = where, pause_s
    tracemalloc.start()
    assert refused(said).mend
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * http.MOST_TOLD
    assert http.HEAD.ends_s == math.inf


def response(*headers, body=b"", status="200 OK"):
    """An answer as it goes over the line."""
    return "\r\n".join([f"HTTP/1.1 {status}", "Connection: close", *headers, "", ""]).encode() + body


SOME = {"rfilename": "model.safetensors", "size": 4, "lfs": {"sha256": "0" * 64, "size": 4, "pointerSize": 134}}
LISTS = {  # what a list of files may hold instead of files
    "nothing": None,
    "a number": 7,
    "a text": "x" * 1000,
    "no objects": [1, None, "x", []],
    "no names": [{}],
    "names that are none": [{"rfilename": 5, "size": 1}, {"rfilename": None}],
    "no sizes": [SOME | {"size": None, "lfs": None}],
    "sizes that are none": [SOME | {"lfs": SOME["lfs"] | {"size": size}} for size in (-1, 1.5, "4", [])],
    "hashes that are none": [SOME | {"lfs": SOME["lfs"] | {"sha256": name}} for name in ("../x", "", None, "g" * 64)],
    "a size beyond any disk": [SOME | {"lfs": SOME["lfs"] | {"size": 2**80}}, {"rfilename": "config.json", "size": 1}],
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_that_no_hub_gives_is_one_message_and_brings_nothing(project, hub, name):
    hub.listed = lambda _: {"siblings": LISTS[name]}
    assert refused("mend:").mend
    assert not hub.paths("/resolve/")
    assert left(project) == []


ABOVE = (
    "../model.safetensors", "/tmp/model.safetensors", "a/../../model.safetensors", "..safetensors", "a\\b.safetensors",
    "\u202emodel.safetensors", "model\n.safetensors", "x" * 5000 + ".safetensors", "LICENSE.partial",
)  # fmt: skip


def test_names_that_lead_elsewhere_are_not_asked_for(project, hub):
    hub.listed = lambda listed: {"siblings": [*listed["siblings"], *(SOME | {"rfilename": name} for name in ABOVE)]}
    fetch(MODEL)
    assert left(project) == whole(hub)


LOOP = "Location: {url}/pfnet/plamo-2-1b/resolve/{commit}/config.json"
ANSWERS = {  # part of a path, and what comes for it: in turn lines of a header and a body
    "a redirect to itself": ("/resolve/", response(LOOP, "Content-Length: 0", status="302 Found")),
    "a redirect of the list": (
        "/api/",
        response("Location: {url}/api/models/x", "Content-Length: 0", status="307 Temporary"),
    ),
    "a redirect to a file": ("/storage/", response("Location: file:///etc/passwd", status="302 Found")),
    "a redirect to nowhere": ("/resolve/", response("Location: http://[::1", status="302 Found")),
    "a redirect without a place": ("/resolve/", response("Content-Length: 0", status="302 Found")),
    "no HTTP": ("/api/", b"SSH-2.0-OpenSSH_9.2\r\n" * 100),
    "nothing": ("/resolve/", b""),
    "a status that is none": ("/resolve/", b"HTTP/1.1 99999 X\r\n\r\n"),
    "headers without end": ("/resolve/", b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200_000),
    "a header as long as a file": ("/api/", b"HTTP/1.1 200 OK\r\nX: " + b"y" * (8 << 20)),
    "only informational answers": ("/resolve/", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 500),
    "a length that is none": ("/resolve/", response("Content-Length: x", body=b"{}")),
    "two lengths": ("/resolve/", response("Content-Length: 1", "Content-Length: 2", body=b"{}")),
    "a length below none": ("/resolve/", response("Content-Length: -5", body=b"{}")),
    "a longer length": ("/storage/", response("Content-Length: 99999999999", body=b"{}")),
    "a shorter body": ("/resolve/", response("Content-Length: 1", body=b"{")),
    "chunks that are none": ("/resolve/", response("Transfer-Encoding: chunked", body=b"zz\r\n")),
    "a chunk beyond any memory": ("/resolve/", response("Transfer-Encoding: chunked", body=b"f" * 20 + b"\r\nx")),
    "a compressed body": ("/resolve/", response("Content-Encoding: gzip", body=gzip.compress(bytes(10 << 20)))),
    "a body compressed twice": ("/api/", response("Content-Encoding: gzip, br", body=gzip.compress(bytes(10 << 20)))),
    "JSON that nests": ("/api/", response("Content-Type: application/json", body=b"[" * 200_000)),
    "JSON of one number": ("/api/", response("Content-Type: application/json", body=b"9" * 100_000)),
    "JSON of an infinity": ("/api/", response("Content-Type: application/json", body=b'{"sha": 1e999}')),
    "no content": ("/resolve/", response(status="204 No Content")),
    "not modified": ("/resolve/", response(status="304 Not Modified")),
    "a part of another place": ("/storage/", response("Content-Range: bytes 9-9/10", body=b"x", status="206 Partial")),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_no_hub_gives_is_one_message_and_leaves_nothing_that_counts(project, hub, name):
    where, answer = ANSWERS[name]
    hub.raw[where] = answer.replace(b"{url}", hub.url.encode()).replace(b"{commit}", commit(hub).encode())
    tracemalloc.start()
    error = refused("")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error.mend
    assert peak < 64 << 20
    assert not [name for name in left(project) if "/etc/" in name or name.endswith(snapshots.RECORD)]
    hub.raw.clear()
    fetch(MODEL)
    assert left(project) == whole(hub)


def test_a_file_that_changes_between_its_halves_is_refused_and_brought_anew(project, hub):
    (large,) = (name for name in SMALL if name.endswith(".safetensors"))
    hub.cuts = [100] * 50
    refused("cannot be reached|stopped")
    hub.cuts = []
    hub.replaced[large] = bytes(len(SMALL[large]))
    refused("what came has SHA-256.*not kept")
    hub.replaced.clear()
    fetch(MODEL)
    assert left(project) == whole(hub)


def test_a_server_that_ignores_where_to_go_on_brings_no_wrong_file(project, hub):
    hub.cuts, hub.unranged = [100] * 50, True
    refused("")
    hub.cuts = []
    with suppress(StudyError):  # its second body may be taken for the rest of the first
        fetch(MODEL)
    fetch(MODEL)
    assert left(project) == whole(hub)


def test_a_link_in_place_of_an_unfinished_file_is_not_followed(project, hub):
    (large,) = (name for name in SMALL if name.endswith(".safetensors"))
    folder, victim = snapshots.partial(snapshots.folder_of(MODEL, commit(hub))), project / "victim"
    folder.mkdir(parents=True)
    victim.write_text("mine")
    transfer.unfinished(folder / large).symlink_to(victim)
    fetch(MODEL)
    assert victim.read_text() == "mine"
    assert left(project) == whole(hub)


def test_a_list_too_long_compressed_or_without_weights_is_refused(project, hub):
    hub.coding = "gzip"
    refused("compresses")
    hub.coding = ""
    hub.publish(SMALL | {f"model-{number}.safetensors": b"" for number in range(fetching.MOST_FILES)})
    refused("more than 1,000")
    hub.publish({"model.gguf": b"GGUF", "config.json": b"{}"})
    refused("no released weights in safetensors")
    assert not hub.paths("/resolve/")
    assert left(project) == []


def test_a_full_disk_is_named_before_anything_is_downloaded_and_on_the_way(project, hub, monkeypatch):
    with monkeypatch.context() as full:
        full.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
        refused("bytes more, only 1,000 are free")
    assert (hub.paths("/resolve/"), left(project)) == ([], [])

    def fills_up(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(transfer, "http_get", fills_up)
    refused("the disk is full")


def test_a_folder_that_cannot_be_written_or_is_being_written_is_named(project):
    (project / "data/models").write_text("in the way")
    refused("cannot be written")
    (project / "data/models").unlink()
    snapshots.root(MODEL).mkdir(parents=True)
    lock = os.open(snapshots.root(MODEL), os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    refused("another process")
    os.close(lock)
    assert fetch(MODEL).is_dir()


def test_offline_without_files_says_how_to_get_them_and_asks_nobody(project, hub):
    refused("not here.*plamo-study models fetch plamo-2-1b", offline=True)
    assert not (project / "data/models").exists()
    assert "not here" in child(HF_HUB_OFFLINE="1").communicate(timeout=60)[0]
    assert hub.requests == []


@pytest.mark.parametrize(("name", "said"), [("gpt", "not in the registry"), (plan.MATCHED, "no repository")])
def test_a_model_without_a_release_is_named(name, said):
    with pytest.raises(StudyError, match=said):
        fetch(name)


# ---------------------------------------------------------------- the list


def test_the_list_says_what_is_pinned_here_and_whole(project, hub, monkeypatch):
    def weights():
        entry = next(e for e in inventory.entries(registry.load()) if (e.spec.name, e.spec.scale) == (MODEL, "weights"))
        return inventory.as_dict(entry)

    assert (weights()["pin"], weights()["files"]) == ("unpinned", [])
    folder = fetch(MODEL)
    (file,) = weights()["files"]
    assert (file["size"], file["sha256"], file["checked"]) == (BYTES, sha256(SMALL[WEIGHTS]), "")
    pin(project, monkeypatch, pinned(hub))
    assert weights()["pin"] == "pinned"
    (folder / "config.json").unlink()
    assert weights()["files"][0]["checked"] == "incomplete: fetch again"


def test_the_list_shows_findings_only_of_the_bytes_that_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "MODELS", tmp_path)
    path = synthetic.make(plan.MATCHED, "mini", "Q8_0")
    known = {(plan.MATCHED, "mini"): LOAD()[plan.MATCHED, "mini"]}
    pins = known[plan.MATCHED, "mini"].sha256

    def listed():
        ((file,),) = (entry.files for entry in inventory.entries(known))
        return file

    assert listed() == inventory.FileHere(str(path), "Q8_0", path.stat().st_size, pins["Q8_0"], "")
    inventory.record(path, pins["Q8_0"], [{"severity": "warning"}, {"severity": "blocking"}, {"severity": "warning"}])
    assert (listed().sha256, listed().checked) == (pins["Q8_0"], "1 blocking, 2 warning")
    os.utime(path, (0, 0))
    assert listed().checked == "changed since: check again"
    (tmp_path / f"{path.name}.findings.json").write_text("{")
    assert "damaged" in listed().checked
    monkeypatch.setitem(pins, "Q8_0", "ab" * 32)
    assert listed().checked == "differs from its pin"
