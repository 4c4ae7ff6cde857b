"""One file of a Hugging Face repository, by huggingface_hub."""

from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

from llama_meter import paths
from llama_meter.errors import StudyError
from llama_meter.models import tensors

LICENCE = "accept its licence on its page, then set HF_TOKEN"


def fetch(repository: str, name: str, revision: str = "main", sha256: str = "") -> tuple[Path, str]:
    """Download the file `name` of `repository` into data/models/hub and return its path and SHA-256.

    An interrupted download goes on. Raises StudyError where the hub refuses or cannot be reached, and where the file's
    hash is not `sha256`.
    """
    folder = paths.MODELS / "hub" / repository.replace("/", "--")
    try:
        path = Path(hf_hub_download(repository, name, revision=revision, local_dir=folder))
    except GatedRepoError as error:
        raise StudyError(repository, "is gated", LICENCE) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
        why = str(error).splitlines()[0]
        raise StudyError(f"{repository} {name}", why, "check both names and the network") from error
    found = tensors.read_sha256(path)
    if sha256 and found != sha256.lower():
        raise StudyError(str(path), f"its SHA-256 is {found}, not {sha256}", "delete it and fetch it again")
    return path, found
