"""Released files from a hub on loopback, through the real client: what comes is whole and verified, or a message.

Where the environment matters the fetch runs in a process of its own.
"""

import errno
import fcntl
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import tomllib
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from hub import Hub, Refusal, files_of, serve
from huggingface_hub import constants, file_download

from plamo_study import paths
from plamo_study.errors import StudyError
from plamo_study.measure import plan
from plamo_study.models import fetch as fetching, inventory, registry, snapshots, synthetic, transfer
from plamo_study.models.fetch import fetch
from plamo_study.models.refusals import Question, explained

MODEL = "plamo-2-1b"
TOKEN = "hf_planted000000000000000000000000secret"
MIB = 1 << 20
KEPT = 10 * MIB  # the client writes pieces of this size
LARGE = random.Random(4).randbytes(25 * MIB + 12345)
SMALL = {
    "config.json": b'{"model_type": "plamo2"}',
    "model.safetensors": random.Random(5).randbytes(70_000),
    "tokenizer.jsonl": b'["a", 0.0, "NORMAL"]\n' * 100,
    "tokenizer_config.json": b"{}",
    "README.md": b"# A model",
    "LICENSE": b"Apache-2.0",
}
NOT_WANTED = {
    "modeling_plamo.py": b"raise SystemExit('remote code')",
    "pytorch_model.bin": b"pickle",
    "sub/model.safetensors": b"in a folder",
    "../../evil.safetensors": b"outside",
    ".hidden.safetensors": b"hidden",
    "/tmp/evil.safetensors": b"elsewhere",
}

LOAD = registry.load.__wrapped__  # without its cache
PROJECT = """
[models.plamo-2-1b]
arch = "plamo2"
[models.plamo-2-1b.hub]
repository = "pfnet/plamo-2-1b"
licence = "Some Licence"
gated = true
{pins}
[models.plamo-2-1b.shape]
{sizes}
[models.unreleased]
arch = "plamo2"
[models.unreleased.shape]
{sizes}
"""
SIZES = """hidden = 64
layers = 2
heads = 2
kv_heads = 1
ffn = 64
mamba_heads = 2
vocab = 512
context_length = 64
head_dim = 64
rms_eps = 1e-6
rope_theta = 1e4
tied = true"""

CHILD = """
import sys
from pathlib import Path
from types import SimpleNamespace
if "audit" in sys.argv:
    import json
    seen = set()
    def look(event, args):
        if event == "socket.connect": seen.add(str(args[1][0]) if isinstance(args[1], tuple) else "unix")
        if event in ("socket.getaddrinfo", "socket.gethostbyname"): seen.add(str(args[0]))
    sys.addaudithook(look)
from plamo_study.models.fetch import fetch
print(fetch("plamo-2-1b"))
if "audit" in sys.argv:
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
    (tmp_path / "data").mkdir()
    pin(tmp_path, monkeypatch, "")
    return tmp_path


def pin(project, monkeypatch, pins):
    """Write the registry of the project, with these lines in the hub's table."""
    toml = project / "data/models.toml"
    toml.write_text(PROJECT.format(pins=pins, sizes=SIZES))
    monkeypatch.setattr(registry, "load", lambda: LOAD(toml))


def child(*arguments, **environment):
    command = [sys.executable, "-c", CHILD, *arguments]
    return subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def sha256(body):
    return hashlib.sha256(body).hexdigest()


def left(project):
    """Everything below the project's models, by name."""
    root = project / "data/models"
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def commit(hub: Hub) -> str:
    return hub.branches["main"]


# ---------------------------------------------------------------- what comes


def test_what_is_needed_comes_verified_and_is_recorded(project, hub):
    folder = fetch(MODEL)
    assert folder == project / "data/models/hub" / MODEL / commit(hub)
    record = folder / snapshots.RECORD
    assert files_of(folder) == SMALL | {snapshots.RECORD: record.read_bytes()}
    assert left(project) == sorted(f"hub/{MODEL}/{commit(hub)}/{name}" for name in (*SMALL, snapshots.RECORD))
    raw = json.loads(record.read_text())
    assert {name: file["sha256"] for name, file in raw["files"].items()} == {n: sha256(b) for n, b in SMALL.items()}
    assert (raw["revision"], raw["asked"], raw["repository"]) == (commit(hub), "main", hub.repository)


def test_the_second_fetch_verifies_and_asks_nobody(project, hub):
    first = fetch(MODEL)
    asked, calls = len(hub.requests), []
    assert fetch(MODEL, lambda *call: calls.append(call)) == first
    assert len(hub.requests) == asked
    assert calls[-1] == (sum(map(len, SMALL.values())),) * 2


def test_the_record_can_be_pinned_as_it_is_printed(project, hub, monkeypatch):
    fetch(MODEL)
    text = snapshots.toml(MODEL, snapshots.find(MODEL, None))
    pins = tomllib.loads(text)["models"][MODEL]["hub"]
    assert pins == {"revision": commit(hub), "sha256": {name: sha256(body) for name, body in SMALL.items()}}
    pin(project, monkeypatch, text.split("\n", 1)[1])
    assert registry.hub(MODEL).sha256 == pins["sha256"]
    assert fetch(MODEL, offline=True).name == commit(hub)


def test_the_local_hub_satisfies_the_clients_own_download(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    wanted = dict(repo_id=hub.repository, endpoint=hub.url, token=False, allow_patterns=list(SMALL))
    folder = huggingface_hub.snapshot_download(cache_dir=tmp_path / "cache", max_workers=1, **wanted)
    assert files_of(Path(folder)) == SMALL
    assert Path(folder).name == commit(hub)


def test_an_unpinned_model_stays_what_it_was_until_another_revision_is_named(project, hub):
    first = fetch(MODEL)
    moved = hub.publish(SMALL | {"README.md": b"# Retrained"})
    assert fetch(MODEL) == first
    assert fetch(MODEL, revision="main").name == moved
    assert fetch(MODEL, revision="main").name == moved
    assert fetch(MODEL, revision=first.name) == first
    assert fetch(MODEL, offline=True, revision="main").name == moved


def test_a_pinned_revision_is_what_comes_though_main_has_moved(project, hub, monkeypatch):
    old = commit(hub)
    hub.publish(SMALL | {"model.safetensors": b"other weights"})
    pin(project, monkeypatch, f'revision = "{old}"')
    assert fetch(MODEL).name == old


# ---------------------------------------------------------------- cuts


@pytest.mark.parametrize("reset", [False, True], ids=["ended", "reset"])
def test_a_download_cut_at_random_points_resumes_to_the_right_hash(project, hub, monkeypatch, reset):
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda s: None))
    hub.publish(SMALL | {"model.safetensors": LARGE})
    draw, calls = random.Random(f"cuts {reset}"), []
    hub.reset, hub.cuts = reset, [draw.randrange(1, 10 * MIB), draw.randrange(18 * MIB, 24 * MIB), 0]
    folder = fetch(MODEL, lambda *call: calls.append(call))
    assert sha256((folder / "model.safetensors").read_bytes()) == sha256(LARGE)
    starts = [request.start for request in hub.requests if "storage" in request.path]
    assert len(starts) == 4, "cut three times"
    assert max(starts) >= KEPT, "resumed, not begun anew"
    total = len(LARGE) + sum(len(body) for name, body in SMALL.items() if name != "model.safetensors")
    assert calls[-1] == (total, total)
    assert max(done for done, _ in calls) == total


def test_a_killed_fetch_leaves_nothing_that_counts_and_the_next_one_resumes(project, hub):
    hub.publish(SMALL | {"model.safetensors": LARGE})
    hub.stalls = [21 * MIB]
    process = child()
    assert hub.stalled.wait(30)
    growing = project / "data/models/hub" / MODEL / f"{commit(hub)}.partial" / "model.safetensors.partial"
    while growing.stat().st_size < 2 * KEPT:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hub.go_on.set()
    assert snapshots.held(MODEL) == []
    with pytest.raises(StudyError, match="not here"):
        fetch(MODEL, offline=True)
    folder = fetch(MODEL)
    assert sha256((folder / "model.safetensors").read_bytes()) == sha256(LARGE)
    assert [request.start for request in hub.requests if "storage" in request.path] == [0, 2 * KEPT]
    assert left(project) == sorted(f"hub/{MODEL}/{commit(hub)}/{name}" for name in (*SMALL, snapshots.RECORD))


def test_a_server_that_falls_silent_is_asked_again(project, hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    hub.stalls = [30_000]
    assert files_of(fetch(MODEL))["model.safetensors"] == SMALL["model.safetensors"]
    assert len(hub.paths("storage")) == 2


def test_a_server_that_keeps_resetting_is_given_up_with_a_message(project, hub, monkeypatch):
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda s: None))
    hub.reset, hub.cuts = True, [100] * 20
    with pytest.raises(StudyError, match="stopped answering") as caught:
        fetch(MODEL)
    assert "resumes" in caught.value.mend
    assert snapshots.held(MODEL) == []


# ---------------------------------------------------------------- corrupt and untrue


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("fault", ["flipped", "short", "long"])
def test_a_corrupted_body_is_refused_and_not_kept(project, hub, name, fault):
    body = SMALL[name]
    flipped = bytes([body[0] ^ 1]) + body[1:]
    hub.replaced[name] = {"flipped": flipped, "short": body[:-3], "long": body + b"more"}[fault]
    with pytest.raises(StudyError, match=rf"{name}.*not kept"):
        fetch(MODEL)
    assert not any(f"/{name}" in path for path in left(project))
    assert snapshots.held(MODEL) == []
    hub.replaced.clear()
    assert files_of(fetch(MODEL))[name] == body


def test_a_body_without_end_is_not_read_to_its_end(project, hub):
    hub.replaced["model.safetensors"] = LARGE
    with pytest.raises(StudyError, match="not kept"):
        fetch(MODEL)
    assert hub.sent < len(LARGE)


def test_a_file_that_rots_on_disk_is_named_offline_and_brought_again_online(project, hub):
    folder = fetch(MODEL)
    (folder / "model.safetensors").write_bytes(SMALL["model.safetensors"][:-1] + b"!")
    with pytest.raises(StudyError, match=r"model\.safetensors: has SHA-256"):
        fetch(MODEL, offline=True)
    (folder / "README.md").unlink()
    with pytest.raises(StudyError, match=r"README\.md: is missing"):
        fetch(MODEL, offline=True)
    before = len(hub.paths("/resolve/"))
    assert files_of(fetch(MODEL)).items() >= SMALL.items()
    assert {path.rsplit("/", 1)[1] for path in hub.paths("/resolve/")[before:]} == {"model.safetensors", "README.md"}


def test_what_was_recorded_binds_the_hub(project, hub):
    folder = fetch(MODEL)
    (folder / "model.safetensors").unlink()
    hub.announced["model.safetensors"] = sha256(b"swapped")
    hub.replaced["model.safetensors"] = b"swapped".ljust(len(SMALL["model.safetensors"]))
    with pytest.raises(StudyError, match=r"recorded.*nothing was downloaded"):
        fetch(MODEL)


def test_a_record_outlives_a_repair_that_fails(project, hub):
    folder = fetch(MODEL)
    (folder / "model.safetensors").unlink()
    hub.refusals = [Refusal("/storage/", 503)]
    with pytest.raises(StudyError, match="answered 503"):
        fetch(MODEL)
    hub.refusals, hub.announced["model.safetensors"] = [], sha256(b"swapped")
    with pytest.raises(StudyError, match=r"recorded.*nothing was downloaded"):
        fetch(MODEL)


def pinned(hub, **wrong):
    """The lines that pin what the hub has, with these hashes instead."""
    hashes = {name: sha256(body) for name, body in SMALL.items()} | wrong
    listed = ", ".join(f'"{name}" = "{digest}"' for name, digest in hashes.items())
    return f'revision = "{commit(hub)}"\nsha256 = {{ {listed} }}'


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pin_that_does_not_hold_is_refused(project, hub, monkeypatch, name):
    pin(project, monkeypatch, pinned(hub, **{name: "0" * 64}))
    with pytest.raises(StudyError, match=rf"{name}.*SHA-256"):
        fetch(MODEL)
    assert not any(f"/{name}" in path for path in left(project))
    assert not hub.paths("storage"), "a hash that the hub announces is compared before the download"


def test_only_pinned_files_come_where_files_are_pinned(project, hub, monkeypatch):
    pin(project, monkeypatch, pinned(hub))
    hub.commits[commit(hub)]["model-2.safetensors"] = b"not pinned"
    assert files_of(fetch(MODEL)).keys() == {*SMALL, snapshots.RECORD}


def test_a_pinned_file_that_the_repository_lacks_is_named(project, hub, monkeypatch):
    pin(project, monkeypatch, pinned(hub, **{"gone.safetensors": "0" * 64}))
    with pytest.raises(StudyError, match=r"gone\.safetensors: is pinned"):
        fetch(MODEL)


@pytest.mark.parametrize(
    "pins",
    ['revision = "main"', 'sha256 = { "config.json" = "00" }', f'revision = "{"0" * 40}"\nsha256 = {{ a = "b" }}'],
)
def test_a_pin_that_cannot_be_one_is_refused_with_the_registry(project, hub, monkeypatch, pins):
    pin(project, monkeypatch, pins)
    with pytest.raises(StudyError, match=r"models\.plamo-2-1b"):
        registry.hub(MODEL)


def test_a_repository_without_safetensors_is_named_as_such(project, hub):
    hub.publish({"model.gguf": b"GGUF", "config.json": b"{}"})
    with pytest.raises(StudyError, match="no released weights in safetensors"):
        fetch(MODEL)
    assert left(project) == []


# ---------------------------------------------------------------- refusals

REFUSALS = {
    "gated, no token": (Refusal("/resolve/", 401, "GatedRepo"), "", "Some Licence.*no token.*accept its terms at"),
    "gated, token": (Refusal("/resolve/", 403, "GatedRepo"), TOKEN, "gated.*account.*accept its terms at"),
    "bad token": (Refusal("/api/", 401, "", "Invalid credentials in Authorization header"), TOKEN, "token.*HF_TOKEN"),
    "no token": (Refusal("/resolve/", 401), "", "wants a token.*HF_TOKEN"),
    "forbidden": (Refusal("/storage/", 403), TOKEN, "403.*HF_TOKEN"),
    "no repository": (Refusal("/api/", 404, "RepoNotFound"), "", "not on the hub.*models.toml.*HF_TOKEN"),
    "hidden repository": (Refusal("/api/", 401, "RepoNotFound"), "", "private.*HF_TOKEN"),
    "no revision": (Refusal("/api/", 404, "RevisionNotFound"), "", "no revision 'main'.*branch"),
    "no file": (Refusal("/resolve/", 404, "EntryNotFound"), "", "file that it listed.*once more"),
    "disabled": (Refusal("/api/", 403, "", "Access to this resource is disabled."), "", "disabled"),
    "too often": (Refusal("/api/", 429), "", "429.*wait.*HF_TOKEN"),
    "broken": (Refusal("/api/", 500), "", "answered 500.*wait"),
    "away": (Refusal("/storage/", 503), "", "answered 503.*resumes"),
    "login page": (Refusal("/api/", 200, body="<html>Log in</html>"), "", "no hub gives.*login"),
    "other JSON": (Refusal("/api/", 200, body='{"id": "x"}'), "", "no hub gives"),
}


@pytest.mark.parametrize(("refusal", "token", "said"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_says_what_to_accept_or_set(project, hub, monkeypatch, refusal, token, said):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.refusals = [refusal]
    with pytest.raises(StudyError, match=f"(?s){said}") as caught:
        fetch(MODEL)
    assert TOKEN not in str(caught.value)
    assert caught.value.__suppress_context__, "the cause may quote the server"
    assert all(".partial/" in path for path in left(project)), "what came before stays unfinished"


@pytest.mark.parametrize(
    "endpoint", ["http://127.0.0.1:9", "not a url", "ftp://127.0.0.1"], ids=["closed port", "no url", "no http"]
)
def test_a_hub_that_cannot_be_reached_is_named(project, hub, monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(StudyError, match=r"(?s)cannot be reached.*HF_ENDPOINT.*--offline"):
        fetch(MODEL)


def test_a_hub_that_never_answers_is_given_up(project, monkeypatch):
    monkeypatch.setattr(fetching, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StudyError, match="stopped answering"):
            fetch(MODEL)


@pytest.mark.parametrize("where", ["/api/", "/storage/"])
def test_a_hub_that_goes_on_without_end_is_left(project, hub, where):
    hub.endless = where
    tracemalloc.start()
    with pytest.raises(StudyError, match="says more than"):
        fetch(MODEL)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * transfer.MOST_TOLD


@pytest.mark.parametrize("where", ["/api/", "/resolve/", "/storage/"])
def test_a_hub_that_drips_is_left(project, hub, monkeypatch, where):
    monkeypatch.setattr(transfer, "LEAST_S", 0.1)
    hub.drip = where
    hub.publish({name: body * 20 for name, body in SMALL.items()})
    with pytest.raises(StudyError, match=r"bytes in .* s, less than"):
        fetch(MODEL)


def test_a_repository_of_too_many_files_is_none(project, hub, monkeypatch):
    hub.publish(SMALL | {f"model-{number}.safetensors": b"" for number in range(fetching.MOST_FILES)})
    with pytest.raises(StudyError, match="more than 1,000"):
        fetch(MODEL)
    assert not hub.paths("/resolve/")


def test_a_list_that_comes_compressed_is_not_unpacked(project, hub):
    hub.coding = "gzip"
    with pytest.raises(StudyError, match="compresses"):
        fetch(MODEL)


def test_no_message_log_or_traceback_shows_the_token(project, hub):
    for where, status in (("/api/", 401), ("/resolve/", 403), ("/storage/", 500)):
        hub.refusals = [Refusal(where, status, "", "you sent {token}")]
        process = child(HF_TOKEN=TOKEN, HF_DEBUG="1", HF_HUB_VERBOSITY="debug")
        said = process.communicate(timeout=60)[0]
        assert process.returncode == 1
        assert "StudyError" in said
        assert TOKEN not in said
    sent = {("storage" in request.path, request.token) for request in hub.requests}
    assert sent == {(False, f"Bearer {TOKEN}"), (True, "")}, "the token went to the hub, and only there"


def test_a_full_disk_is_named_before_anything_is_downloaded(project, hub, monkeypatch):
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda _: _Usage())
    with pytest.raises(StudyError, match="bytes more, only 1,000 are free"):
        fetch(MODEL)
    assert not hub.paths("/resolve/")
    assert list((project / "data/models").rglob("*")) in ([], [project / "data/models/hub"])


class _Usage:
    free = 1000


def test_a_disk_that_fills_up_on_the_way_is_named():
    asked = Question(registry.Hub("a/b", "L", False), "main", "http://127.0.0.1", again="again")
    assert "disk is full" in str(explained(OSError(errno.ENOSPC, "No space left on device"), asked))
    assert "Permission denied" in str(explained(OSError(errno.EACCES, "Permission denied"), asked))


def test_a_folder_that_cannot_be_written_is_named(project, hub):
    (project / "data/models").write_text("in the way")
    with pytest.raises(StudyError, match="cannot be written"):
        fetch(MODEL)


def test_two_fetches_of_a_model_do_not_write_into_one_file(project, hub):
    folder = snapshots.root(MODEL)
    folder.mkdir(parents=True)
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(StudyError, match="another process"):
        fetch(MODEL)
    os.close(lock)
    assert fetch(MODEL).is_dir()


@pytest.mark.parametrize(("name", "said"), [("gpt", "not in the registry"), ("unreleased", "no repository")])
def test_a_model_without_a_release_is_named(project, name, said):
    with pytest.raises(StudyError, match=said):
        fetch(name)


# ---------------------------------------------------------------- offline, and nowhere else


def test_what_is_here_serves_offline_with_the_server_stopped(project, hub):
    folder = fetch(MODEL)
    hub.stopped, asked = True, len(hub.requests)
    assert fetch(MODEL, offline=True) == folder
    assert fetch(MODEL) == folder
    assert len(hub.requests) == asked
    with pytest.raises(StudyError, match="cannot be reached"):
        fetch(MODEL, revision="main")


def test_offline_without_files_says_how_to_get_them(project, hub):
    with pytest.raises(StudyError, match=r"(?s)not here.*plamo-study models fetch plamo-2-1b"):
        fetch(MODEL, offline=True)
    assert hub.requests == []
    assert not (project / "data/models").exists()


def test_the_clients_offline_switch_is_heeded(project, hub):
    refused = child(HF_HUB_OFFLINE="1")
    assert "not here" in refused.communicate(timeout=60)[0]
    assert hub.requests == []
    fetch(MODEL)
    served = child(HF_HUB_OFFLINE="1")
    assert commit(hub) in served.communicate(timeout=60)[0]


def test_no_request_leaves_loopback(project, hub):
    process = child("audit")
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    assert json.loads(said.splitlines()[-1]) == ["127.0.0.1"]
    assert len(hub.requests) == 1 + len(SMALL) + 1, "one list, one request a file, one redirect"


# ---------------------------------------------------------------- the list


def test_the_list_says_what_is_pinned_here_and_whole(project, hub, monkeypatch):
    def weights():
        entry = next(e for e in inventory.entries(registry.load()) if (e.spec.name, e.spec.scale) == (MODEL, "weights"))
        return inventory.as_dict(entry)

    assert (weights()["pin"], weights()["files"], weights()["gated"]) == ("unpinned", [], True)
    folder = fetch(MODEL)
    (file,) = weights()["files"]
    assert file["size"] == sum(map(len, SMALL.values()))
    assert (file["sha256"], file["checked"]) == (sha256(SMALL["model.safetensors"]), "")
    pin(project, monkeypatch, snapshots.toml(MODEL, snapshots.find(MODEL, None)).split("\n", 1)[1])
    assert weights()["pin"] == "pinned"
    (folder / "config.json").unlink()
    assert weights()["files"][0]["checked"] == "incomplete: fetch again"


def test_the_list_shows_findings_only_of_the_bytes_that_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "MODELS", tmp_path)
    path = synthetic.make(plan.MATCHED, "mini", "Q8_0")
    known = {(plan.MATCHED, "mini"): registry.load(paths.MODELS_TOML)[plan.MATCHED, "mini"]}

    def listed():
        (entry,) = inventory.entries(known)
        (file,) = entry.files
        return file

    sha256 = known[plan.MATCHED, "mini"].sha256["Q8_0"]
    assert listed() == inventory.FileHere(str(path), "Q8_0", path.stat().st_size, sha256, "")
    inventory.record(path, sha256, [{"severity": "warning"}, {"severity": "blocking"}, {"severity": "warning"}])
    assert (listed().sha256, listed().checked) == (sha256, "1 blocking, 2 warning")
    inventory.record(path, sha256, [])
    assert listed().checked == "nothing found"
    os.utime(path, (0, 0))
    assert listed().checked == "changed since: check again"
    (tmp_path / f"{path.name}.findings.json").write_text("{")
    assert "damaged" in listed().checked
    monkeypatch.setitem(known[plan.MATCHED, "mini"].sha256, "Q8_0", "ab" * 32)
    assert listed().checked == "differs from its pin"


def test_a_damaged_record_is_named(project, hub):
    folder = fetch(MODEL)
    (folder / snapshots.RECORD).write_text('{"files": {"../../../x": {"size": 1, "sha256": ""}}}')
    with pytest.raises(StudyError, match=r"fetched\.json: is damaged"):
        fetch(MODEL)
