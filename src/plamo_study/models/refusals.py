"""The hub's refusals, each as a StudyError that says what to accept or set.

No text from a server enters a message, so a token that it echoes is never shown. It knows no files.
"""

import errno
from dataclasses import dataclass

import httpx2
from huggingface_hub import errors

from plamo_study.errors import StudyError
from plamo_study.models.registry import Hub

TOKENS = "a token with read access (made in the account settings of the hub)"


@dataclass(frozen=True)
class Question:
    """A request to the hub: the revision, the endpoint, and whether a token was sent.

    `again`: the command that repeats the request.
    """

    hub: Hub
    revision: str
    endpoint: str
    with_token: bool
    again: str


def explained(error: Exception, asked: Question) -> StudyError:
    """A StudyError for whatever the hub's client raised. The error itself is left out: it may quote the server."""
    return _refused(error, asked) or _failed(error, asked)


def _refused(error: Exception, asked: Question) -> StudyError | None:
    repository, page = asked.hub.repository, f"{asked.endpoint}/{asked.hub.repository}"
    match error:
        case errors.GatedRepoError() if asked.with_token:
            why = f"is gated, and the account of this token has no access (licence: {asked.hub.licence})"
            return StudyError(repository, why, f"accept its terms at {page} with that account, then {asked.again}")
        case errors.GatedRepoError():
            why = f"is gated: its licence ({asked.hub.licence}) must be accepted first, and no token is set"
            return StudyError(repository, why, f"accept its terms at {page}, then HF_TOKEN=<read token> {asked.again}")
        case errors.RepositoryNotFoundError():
            why = "is not on the hub, or is private" + ("" if asked.with_token else ", and no token is set")
            mend = f"correct the repository in data/models.toml; if it is private, set HF_TOKEN to {TOKENS}"
            return StudyError(repository, why, mend)
        case errors.RevisionNotFoundError():
            why = f"has no revision {asked.revision!r}"
            return StudyError(repository, why, f"name a branch, tag or commit that {page} lists, or leave it out")
        case errors.RemoteEntryNotFoundError():
            return StudyError(repository, "no longer has a file that it listed", f"{asked.again}, once more")
        case errors.DisabledRepoError():
            return StudyError(repository, "has been disabled", f"see {page}")
        case errors.OfflineModeIsEnabled():
            return StudyError(repository, "is not contacted: HF_HUB_OFFLINE is set", f"unset it, then {asked.again}")
        case errors.HfHubHTTPError():
            return _by_status(error.response.status_code, asked)
    return None


def _by_status(status: int, asked: Question) -> StudyError:
    repository = asked.hub.repository
    if status == 401:
        why = "the hub does not accept the token that was sent" if asked.with_token else "the hub wants a token"
        return StudyError(repository, f"{why} (401)", f"set HF_TOKEN to {TOKENS}, or unset it where none is needed")
    if status == 403:
        why = "the token may not read this repository (403)" if asked.with_token else "is not public (403)"
        page = f"{asked.endpoint}/{repository}"
        return StudyError(repository, why, f"see its terms at {page}, and set HF_TOKEN to {TOKENS} that covers it")
    if status == 429:
        why = "the hub's rate limit is reached (429)"
        more = "" if asked.with_token else "; with HF_TOKEN set the limit is higher"
        return StudyError(repository, why, f"wait some minutes, then {asked.again}; it resumes{more}")
    return StudyError(repository, f"the hub answered {status}", f"wait, then {asked.again}; it resumes")


def _failed(error: Exception, asked: Question) -> StudyError:
    if isinstance(error, httpx2.TransportError | httpx2.InvalidURL):
        why = f"cannot be reached or stopped answering ({type(error).__name__})"
        mend = f"check the network and HF_ENDPOINT, then {asked.again}; it resumes. With --offline it uses what is here"
        return StudyError(asked.endpoint, why, mend)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return StudyError(asked.hub.repository, "the disk is full", f"free space, then {asked.again}; it resumes")
    if isinstance(error, OSError) and error.errno is not None:
        why = f"cannot be written to data/models/hub ({error.strerror})"
        return StudyError(asked.hub.repository, why, "make that folder writable")
    why = f"gave an answer that no hub gives ({type(error).__name__})"
    return StudyError(asked.endpoint, why, f"check HF_ENDPOINT and the network (a login page?), then {asked.again}")
