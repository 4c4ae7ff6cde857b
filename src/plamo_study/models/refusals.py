"""The hub's refusals, each as a StudyError that says what to accept or set.

No text from a server enters a message, so a token that it echoes is never shown. It knows no files.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx2
from huggingface_hub import errors

from plamo_study.errors import StudyError
from plamo_study.models.registry import Hub

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
        case httpx2.TransportError() | httpx2.InvalidURL():
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
