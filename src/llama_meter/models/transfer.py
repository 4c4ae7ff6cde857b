"""Transfers from a hub: files by pin, resumed where they broke off, and its refusals as messages with a mend.

No text from a server enters a message, so a token that it echoes is never shown.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from huggingface_hub import errors
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import http_get

from llama_meter import http
from llama_meter.errors import StudyError
from llama_meter.models.registry import Hub
from llama_meter.models.snapshots import Wanted, checked

TOKENS = "a token with read access (made in the account settings of the hub)"


@dataclass
class Question:
    """A request to the hub: the revision, the endpoint, the headers, a token among them where there is one.

    `again`: the command that repeats the request.
    """

    hub: Hub
    revision: str
    endpoint: str
    again: str
    headers: dict[str, str] = field(default_factory=dict, repr=False)


class CorruptError(Exception):
    """A body that is not what was announced of the file `name`; it has been deleted."""

    def __init__(self, name: str, fault: str):
        super().__init__(fault)
        self.name = name


@contextmanager
def explaining(asked: Question) -> Iterator[None]:
    """Turn whatever the client raises into a StudyError, without its cause, which may quote the server."""
    try:
        yield
    except StudyError:
        raise
    except Exception as error:  # besides its own, the client raises what JSON and strange answers make it raise
        raise explained(error, asked) from None


def explained(error: Exception, asked: Question) -> StudyError:
    """A StudyError for whatever the hub's client raised. The error itself is left out: it may quote the server."""
    repository, again, token = asked.hub.repository, asked.again, "authorization" in asked.headers
    page = f"{asked.endpoint}/{repository}"
    match error:
        case CorruptError():
            repository, why = f"{repository}, {error.name}", f"what came {error}; it was not kept"
            mend = f"{again}, once more"
        case errors.GatedRepoError():
            why = f"is gated: its licence ({asked.hub.licence}) must be accepted first, and no token is set"
            mend = f"accept its terms at {page}, then HF_TOKEN=<read token> {again}"
            if token:
                why = f"is gated, and the account of this token has no access (licence: {asked.hub.licence})"
                mend = f"accept its terms at {page} with that account, then {again}"
        case errors.RepositoryNotFoundError():
            why = "is not on the hub, or is private" + ("" if token else ", and no token is set")
            mend = f"correct the repository in data/models.toml; if it is private, set HF_TOKEN to {TOKENS}"
        case errors.RevisionNotFoundError():
            why = f"has no revision {asked.revision!r}"
            mend = f"name a branch, tag or commit that {page} lists, or leave it out"
        case errors.RemoteEntryNotFoundError():
            why, mend = "no longer has a file that it listed", f"{again}, once more"
        case errors.DisabledRepoError():
            why, mend = "has been disabled", f"see {page}"
        case errors.HfHubHTTPError():
            why, mend = _by_status(error.response.status_code, token, page, again)
        case http.TransportError() | http.InvalidURL():
            repository, why = asked.endpoint, f"cannot be reached or stopped answering ({type(error).__name__})"
            mend = f"check the network and HF_ENDPOINT, then {again}; it resumes. With --offline it uses what is here"
        case OSError(errno=errno.ENOSPC):
            why, mend = "the disk is full", f"free space, then {again}; it resumes"
        case OSError(errno=int()):
            why, mend = f"cannot be written to data/models/hub ({error.strerror})", "make that folder writable"
        case _:
            repository, why = asked.endpoint, f"gave an answer that no hub gives ({type(error).__name__})"
            mend = f"check HF_ENDPOINT and the network (a login page?), then {again}"
    return StudyError(repository, why, mend)


def _by_status(status: int, token: bool, page: str, again: str) -> tuple[str, str]:
    if status == 401:
        why = "the hub does not accept the token that was sent" if token else "the hub wants a token"
        return f"{why} (401)", f"set HF_TOKEN to {TOKENS}, or unset it where none is needed"
    if status == 403:
        why = "the token may not read this repository (403)" if token else "is not public (403)"
        return why, f"see its terms at {page}, and set HF_TOKEN to {TOKENS} that covers it"
    if status == 429:
        more = "" if token else "; with HF_TOKEN set the limit is higher"
        return "the hub's rate limit is reached (429)", f"wait some minutes, then {again}; it resumes{more}"
    return f"the hub answered {status}", f"wait, then {again}; it resumes"


def check_space(folder: Path, files: Sequence[Wanted]) -> None:
    """StudyError unless the missing bytes of `files` fit on the disk of `folder`."""
    need = sum(file.size - min(file.size, _here(folder / file.name)) for file in files)
    free = shutil.disk_usage(folder).free
    if free < need:
        why = f"needs {need:,} bytes more, only {free:,} are free"
        raise StudyError(str(folder), why, f"free space in {folder.parents[2]}, or link it to a larger disk")


def _here(path: Path) -> int:
    return max((p.stat().st_size for p in (path, unfinished(path)) if p.exists()), default=0)


def unfinished(path: Path) -> Path:
    """The path of a file until it is verified."""
    return path.with_name(path.name + ".partial")


def transfer(url: str, path: Path, file: Wanted, headers: dict[str, str], report: Callable[[int], None]) -> str:
    """Bring one file to `path` and return its SHA-256; `report` is called with its bytes so far.

    Raises CorruptError when the result is not `file`, and whatever the client raises when it gives up; the received
    bytes are kept beside `path`, and the next call resumes there.
    """
    growing = unfinished(path)
    path.unlink(missing_ok=True)
    if growing.is_symlink() or _here(path) > file.size:  # a link would be followed
        growing.unlink()
    try:
        with growing.open("ab") as target:
            bar = partial(_Bar, file.size, report)
            http_get(url, target, resume_size=target.tell(), headers=headers, expected_size=file.size, tqdm_class=bar)
    except HfHubHTTPError:
        raise
    except OSError as error:
        if error.errno is not None:
            raise  # otherwise the client complains about the length: what came is checked like any other body
    finally:
        if growing.exists() and not growing.stat().st_size and file.size:
            growing.unlink()
    digest, fault = checked(growing, file)
    if fault:
        growing.unlink(missing_ok=True)
        raise CorruptError(file.name, fault)
    with growing.open("rb") as whole:
        os.fsync(whole.fileno())
    os.replace(growing, path)
    return digest


class _Bar:
    """Passed to the client as its progress bar: counts bytes, and ends a body that is longer than announced."""

    def __init__(self, size: int, report: Callable[[int], None], initial: int = 0, **_: object):
        self.size, self.report, self.position = size, report, initial

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, n: int = 1) -> None:
        """Count `n` bytes more, or fewer when the server restarts."""
        self.position += n
        if self.position > self.size:
            raise OSError("longer than announced")
        self.report(self.position)
