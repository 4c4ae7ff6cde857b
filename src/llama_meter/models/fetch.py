"""Download a model's released weights from the hub, verified: `fetch(name)` is the folder of a complete snapshot.

Files go to data/models/hub/<name>/<commit>/, not to the hub's own cache: that one restarts an interrupted file, holds
links instead of files, and would lose the weights when a project folder moves to another machine.

data/models.toml names repository, commit and hashes. For an unpinned model, the first download is recorded and binding
from then on. It does not know the contents of a file: check.py and convert.py do.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # the client reads it once, when it is imported

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers, get_session

from llama_meter import http
from llama_meter.disk import lock
from llama_meter.errors import StudyError, offer, unwritable
from llama_meter.models import registry, snapshots, transfer
from llama_meter.models.gguf_file import Progress
from llama_meter.models.snapshots import COMMIT, PLAIN, SHA256, Held, Snapshot, Wanted
from llama_meter.models.transfer import Question, explaining

NEEDED = (
    "config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.jsonl",
    "tokenizer_config.json",
    "chat_template.jinja",
    "LICEN[CS]E*",
    "README.md",
)
MOST_FILES = 1000  # of a snapshot; those of the largest models are some 200
ANSWER_S = 30.0  # to list the files; between pieces of a file the client waits HF_HUB_DOWNLOAD_TIMEOUT seconds


def fetch(name: str, progress: Progress | None = None, offline: bool = False, revision: str | None = None) -> Path:
    """The folder with the released files of a model, downloaded where they are not here, every file verified.

    The pinned files are needed; without pins, configuration, tokenizer, safetensors, licence and README. `revision` is
    a commit, branch or tag; by default the pinned commit; without one the local snapshot, else the current main branch.
    `progress` is called with (bytes done, bytes in all), also while local files are verified. `offline` contacts no
    server: the local files must be complete.

    Raises StudyError for an unknown model, a refusal of the hub (it says what to accept or set, and shows no token),
    too little free space, a file that is not what was pinned, recorded or announced (it is deleted), and a folder
    that cannot be written. A failed download is kept, and a later call resumes it.
    """
    hub, offline = registry.hub(name), offline or constants.HF_HUB_OFFLINE
    again = offer(f"models fetch {name}") + (f" --revision {revision}" if revision else "")
    here: Snapshot | None = None
    damaged: dict[str, str] = {}
    if offline or not revision or COMMIT.fullmatch(revision):  # a branch moves: only the hub knows where it stands
        here = snapshots.find(name, revision or hub.revision or None)
    if here:
        folder = snapshots.folder_of(name, here.revision)
        damaged = snapshots.faults(folder, here, snapshots.pins(hub, here.revision), progress)
        if not damaged:
            return folder
    asked = revision or hub.revision
    if offline:
        mend = f"{again}, without --offline and HF_HUB_OFFLINE"
        for file, fault in damaged.items():
            raise StudyError(f"{name}, {file}", fault, f"{mend}: it brings that file again")
        which = f"revision {asked} of its released files is" if asked else "its released files are"
        raise StudyError(f"model {name!r}", f"{which} not here", mend)
    asked = asked or (here.asked if here else constants.DEFAULT_REVISION)
    endpoint = os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
    return _download(name, Question(hub, asked, endpoint, again), here, damaged, progress)


def _download(
    name: str, asked: Question, here: Snapshot | None, damaged: Mapping[str, str], progress: Progress | None
) -> Path:
    """Download what is missing. `here`: a snapshot with `damaged` files, whose commit is requested again."""
    with _alone(snapshots.root(name)), _quiet(), http.bounded(get_session()):
        with explaining(asked):
            asked.headers = build_hf_headers() | {"Accept-Encoding": "identity"}  # ranges of a compressed body differ
            commit, files = _listing(asked, here.revision if here else asked.revision)
        folder, pins = snapshots.folder_of(name, commit), snapshots.pins(asked.hub, commit)
        if here is None and (here := snapshots.read(folder)):
            damaged = snapshots.faults(folder, here, pins, progress)
            if not damaged:
                return folder
        recorded = here or snapshots.read(snapshots.partial(folder))
        expected = {name: file.sha256 for name, file in recorded.files.items()} if recorded else {}
        files = _expected(asked.hub, [f for f in files if not pins or f.name in pins], expected | pins)
        if folder.exists():
            snapshots.reopen(folder, damaged)
        held = _bring(snapshots.partial(folder), files, commit, asked, progress)
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        return snapshots.finish(folder, Snapshot(asked.hub.repository, commit, asked.revision, now, held))


def _listing(asked: Question, revision: str) -> tuple[str, list[Wanted]]:
    """The commit and the needed files of the repository, small ones first, so that a refusal comes early."""
    api = HfApi(asked.endpoint, token=False, headers=asked.headers)  # the headers hold the token
    info = api.model_info(asked.hub.repository, revision=revision, files_metadata=True, timeout=ANSWER_S)
    commit = info.sha or ""
    if not COMMIT.fullmatch(commit) or (COMMIT.fullmatch(revision) and commit != revision):
        raise ValueError("an answer about another commit")
    names = {file.rfilename: file for file in info.siblings or [] if _needed(file.rfilename)}
    if len(names) > MOST_FILES:
        why = f"lists {len(names):,} files that would be downloaded, more than {MOST_FILES:,}"
        raise StudyError(asked.hub.repository, why, "name a repository of one model in data/models.toml")
    return commit, sorted(map(_wanted, names.values()), key=lambda file: (file.size, file.name))


def _bring(
    folder: Path, files: list[Wanted], commit: str, asked: Question, progress: Progress | None
) -> dict[str, Held]:
    """Download the files to `folder` unless they are there already; returns what was verified, by name."""
    done, total = 0, sum(file.size for file in files)
    held: dict[str, Held] = {}

    def report(position: int) -> None:
        if progress:
            progress(done + position, total)

    folder.mkdir(parents=True, exist_ok=True)
    try:
        transfer.check_space(folder, files)
        for file in files:
            digest, fault = snapshots.checked(folder / file.name, file)
            if fault:
                url = hf_hub_url(asked.hub.repository, file.name, revision=commit, endpoint=asked.endpoint)
                with explaining(asked):
                    digest = transfer.transfer(url, folder / file.name, file, asked.headers, report)
            held[file.name] = Held(file.size, digest)
            done += file.size
            report(0)
    finally:
        with suppress(OSError):  # not empty: kept, to go on from
            folder.rmdir()
    return held


def _needed(name: str) -> bool:
    """Whether a file of the repository is needed, by its name, which must not point outside the folder."""
    return (
        bool(PLAIN.fullmatch(name))
        and not name.endswith(".partial")
        and any(fnmatchcase(name, pattern) for pattern in NEEDED)
    )


def _wanted(listed: RepoSibling) -> Wanted:
    """A listed file with its size and hashes; ValueError or TypeError when the list lacks them."""
    size, sha256, git = listed.size, "", listed.blob_id or ""
    if listed.lfs:
        size, sha256, git = listed.lfs.size, listed.lfs.sha256, ""
    if not isinstance(size, int) or size < 0 or not (SHA256 if listed.lfs else COMMIT).fullmatch(sha256 or git):
        raise ValueError("a list of files without sizes and hashes")
    return Wanted(listed.rfilename, size, sha256, git)


def _expected(hub: registry.Hub, files: list[Wanted], expected: Mapping[str, str]) -> list[Wanted]:
    """The files with their expected hashes. StudyError, before any download, when these cannot be met."""
    names = {file.name for file in files}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        mend = "name a repository with config.json and *.safetensors in data/models.toml"
        raise StudyError(hub.repository, "has no released weights in safetensors format", mend)
    if gone := sorted(expected.keys() - names):
        raise StudyError(f"{hub.repository}, {gone[0]}", "is pinned or recorded, and not in the repository", MEND_PIN)
    for file in files:
        pin = expected.get(file.name, file.sha256)
        if file.sha256 and pin != file.sha256:
            why = f"the hub announces SHA-256 {file.sha256[:12]}…, pinned or recorded is {pin[:12]}…"
            raise StudyError(f"{hub.repository}, {file.name}", f"{why}; nothing was downloaded", MEND_PIN)
    return [replace(file, sha256=expected.get(file.name, file.sha256)) for file in files]


MEND_PIN = "correct the pin in data/models.toml, or name another --revision, if that file is meant to differ"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Allow one download of a model at a time; OSErrors of the folder become messages. Removes an empty folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = held = os.open(folder, os.O_RDONLY)
        try:
            held = lock(opened)
            yield
        finally:
            for descriptor in {opened, held}:
                os.close(descriptor)
            with suppress(OSError):
                folder.rmdir()
    except BlockingIOError as error:
        raise StudyError(str(folder), "another process is fetching this model", "wait for it to end") from error
    except OSError as error:
        raise unwritable(folder, error) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the client's log of retries and server text; the message at the end covers them."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
