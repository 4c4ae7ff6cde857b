"""Paths of the project's files, independent of the working directory. PLAMO_STUDY_ROOT moves the whole tree."""

import os
from pathlib import Path

ROOT = Path(os.environ.get("PLAMO_STUDY_ROOT") or Path(__file__).parents[2]).resolve()
DATA = ROOT / "data"
MODELS_TOML = DATA / "models.toml"
MODELS = DATA / "models"
MEASURED = DATA / "measured"
PUBLISHED = DATA / "published"
NOTEBOOKS = ROOT / "notebooks"
REPORTS = ROOT / "reports"
