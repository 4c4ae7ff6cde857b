"""Download a model's released weights from the hub, verified: `fetch(name)` is the folder of a complete snapshot.

Files go to data/models/hub/<name>/<commit>/, not to the hub's own cache: that one restarts an interrupted file, holds
links instead of files, and would lose the weights when a project folder moves to another machine.

data/models.toml names repository, commit and hashes. For an unpinned model, the first download is recorded and binding
from then on. It does not know the contents of a file: check.py and convert.py do.
"""

import fcntl
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # the client reads it once, when it is imported

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers

from plamo_study.errors import StudyError
from plamo_study.models import registry, snapshots, transfer
from plamo_study.models.gguf_file import Progress
from plamo_study.models.refusals import Question, explained
from plamo_study.models.snapshots import COMMIT, PLAIN, Held, Snapshot
from plamo_study.models.transfer import Wanted

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
SHA256 = re.compile(r"[0-9a-f]{64}")


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
    download = _Download(name, hub, revision, progress)
    if revision and not COMMIT.fullmatch(revision) and not offline:
        return download.run()  # a branch moves: only the hub knows where it stands
    here = snapshots.find(name, revision or hub.revision or None)
    damaged = download.damaged(here) if here else {}
    if here and not damaged:
        return snapshots.folder_of(name, here.revision)
    if offline:
        raise download.absent(damaged)
    return download.run(here, damaged)


class _Download:
    """The download of one snapshot to data/models/hub/<name>."""

    def __init__(self, name: str, hub: registry.Hub, revision: str | None, progress: Progress | None):
        self.name, self.hub, self.progress = name, hub, progress
        self.asked = revision or hub.revision
        self.again = f"plamo-study models fetch {name}" + (f" --revision {revision}" if revision else "")
        self.headers: dict[str, str] = {}
        self.done = self.total = 0

    def damaged(self, here: Snapshot) -> dict[str, str]:
        """Faults in the files of a complete snapshot, by name."""
        folder = snapshots.folder_of(self.name, here.revision)
        return snapshots.faults(folder, here, snapshots.pins(self.hub, here.revision), self.progress)

    def absent(self, damaged: Mapping[str, str]) -> StudyError:
        """The error when no local snapshot is usable offline."""
        mend = f"{self.again}, without --offline and HF_HUB_OFFLINE"
        for file, fault in damaged.items():
            return StudyError(f"{self.name}, {file}", fault, f"{mend}: it brings that file again")
        which = f"revision {self.asked} of its released files is" if self.asked else "its released files are"
        return StudyError(f"model {self.name!r}", f"{which} not here", mend)

    def run(self, here: Snapshot | None = None, damaged: Mapping[str, str] | None = None) -> Path:
        """Download what is missing. `here`: a snapshot with `damaged` files, whose commit is requested again."""
        self.asked = self.asked or (here.asked if here else constants.DEFAULT_REVISION)
        with _alone(snapshots.root(self.name)), _quiet(), transfer.bounded():
            asked = self._question()
            with _explaining(asked):
                commit, files = self._listing(asked, here.revision if here else self.asked)
            folder = snapshots.folder_of(self.name, commit)
            if here is None and (here := snapshots.read(folder)):
                damaged = self.damaged(here)
                if not damaged:
                    return folder
            recorded = here or snapshots.read(snapshots.partial(folder))
            expected = {name: file.sha256 for name, file in recorded.files.items()} if recorded else {}
            pins = snapshots.pins(self.hub, commit)
            files = _expected(self.hub, [f for f in files if not pins or f.name in pins], expected | pins)
            if folder.exists():
                snapshots.reopen(folder, damaged or {})
            return self._fill(folder, files, asked)

    def _question(self) -> Question:
        endpoint = os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
        asked = Question(self.hub, self.asked, endpoint, with_token=False, again=self.again)
        with _explaining(asked):
            self.headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        return replace(asked, with_token="authorization" in self.headers)

    def _listing(self, asked: Question, revision: str) -> tuple[str, list[Wanted]]:
        """The commit and the needed files of the repository, small ones first, so that a refusal comes early."""
        api = HfApi(asked.endpoint, token=False, headers=self.headers)  # the headers hold the token
        info = api.model_info(self.hub.repository, revision=revision, files_metadata=True, timeout=ANSWER_S)
        commit = info.sha or ""
        if not COMMIT.fullmatch(commit) or (COMMIT.fullmatch(revision) and commit != revision):
            raise ValueError("an answer about another commit")
        names = {file.rfilename: file for file in info.siblings or [] if _needed(file.rfilename)}
        if len(names) > MOST_FILES:
            why = f"lists {len(names):,} files that would be downloaded, more than {MOST_FILES:,}"
            raise StudyError(self.hub.repository, why, "name a repository of one model in data/models.toml")
        return commit, sorted(map(_wanted, names.values()), key=lambda file: (file.size, file.name))

    def _fill(self, folder: Path, files: list[Wanted], asked: Question) -> Path:
        unfinished = snapshots.partial(folder)
        unfinished.mkdir(parents=True, exist_ok=True)
        self.done, self.total = 0, sum(file.size for file in files)
        held: dict[str, Held] = {}
        try:
            transfer.check_space(unfinished, files)
            for file in files:
                held[file.name] = Held(file.size, self._bring(unfinished / file.name, file, folder.name, asked))
                self._report(file.size)
                self.done += file.size
        finally:
            with suppress(OSError):  # not empty: kept, to go on from
                unfinished.rmdir()
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        return snapshots.finish(folder, Snapshot(self.hub.repository, folder.name, self.asked, now, held))

    def _bring(self, path: Path, file: Wanted, commit: str, asked: Question) -> str:
        """The SHA-256 of one file, downloaded unless it is here already."""
        digest, fault = transfer.checked(path, file)
        if not fault:
            return digest
        url = hf_hub_url(self.hub.repository, file.name, revision=commit, endpoint=asked.endpoint)
        try:
            with _explaining(asked):
                return transfer.transfer(url, path, file, self.headers, self._report)
        except transfer.CorruptError as error:
            what = f"{self.hub.repository}, {file.name}"
            raise StudyError(what, f"what came {error}; it was not kept", f"{asked.again}, once more") from error

    def _report(self, position: int) -> None:
        if self.progress:
            self.progress(self.done + position, self.total)


def _needed(name: str) -> bool:
    """Whether a file of the repository is needed, by its name, which must not point outside the folder."""
    return bool(PLAIN.fullmatch(name)) and any(fnmatchcase(name, pattern) for pattern in NEEDED)


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
        known = expected.get(file.name, file.sha256)
        if file.sha256 and known != file.sha256:
            why = f"the hub announces SHA-256 {file.sha256[:12]}…, pinned or recorded is {known[:12]}…"
            raise StudyError(f"{hub.repository}, {file.name}", f"{why}; nothing was downloaded", MEND_PIN)
    return [replace(file, sha256=expected.get(file.name, file.sha256)) for file in files]


MEND_PIN = "correct the pin in data/models.toml, or name another --revision, if that file is meant to differ"


@contextmanager
def _explaining(asked: Question) -> Iterator[None]:
    """Turn whatever the client raises into a StudyError, without its cause, which may quote the server."""
    try:
        yield
    except (StudyError, transfer.CorruptError):
        raise
    except Exception as error:  # besides its own, the client raises what JSON and strange answers make it raise
        raise explained(error, asked) from None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Allow one download of a model at a time; OSErrors of the folder become messages. Removes an empty folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(lock)
            with suppress(OSError):
                folder.rmdir()
    except BlockingIOError as error:
        raise StudyError(str(folder), "another process is fetching this model", "wait for it to end") from error
    except OSError as error:
        why = f"cannot be written ({error.strerror})"
        raise StudyError(str(folder), why, "make data/models a writable folder") from error


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
