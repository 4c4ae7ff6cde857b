"""Paths of the project's files, independent of the working directory. PLAMO_STUDY_ROOT moves the whole tree.

Installed without the repository, the instrument keeps what it remembers of files in the user's cache folder.
"""

import os
from pathlib import Path


def _root() -> Path:
    if asked := os.environ.get("PLAMO_STUDY_ROOT"):
        return Path(asked).resolve()
    repository = Path(__file__).resolve().parents[2]
    if (repository / "data" / "models.toml").exists():
        return repository
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "llama-meter"


ROOT = _root()
DATA = ROOT / "data"
INSTALLED = Path(__file__).with_name("models.toml")  # a wheel brings the registry along
MODELS_TOML = INSTALLED if INSTALLED.exists() else DATA / "models.toml"
MODELS = DATA / "models"
MEASURED = DATA / "measured"
PUBLISHED = DATA / "published"
NOTEBOOKS = ROOT / "notebooks"
REPORTS = ROOT / "reports"
