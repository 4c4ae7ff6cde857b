"""What `make study` measures on the machine at hand, and the files that it needs."""

import shutil
from collections import Counter
from collections.abc import Iterable

from llama_meter import journal, paths
from llama_meter.errors import StudyError
from llama_meter.measure import files
from llama_meter.measure.plan import Plan
from llama_meter.models import recipes, registry

NOTEBOOK = "your-machine"  # and the study behind it
SCALE = "shape"  # of the study's own models
MINUTES = 6.0  # default for measuring; writing files comes on top
ROOM = 1 << 30  # bytes that stay free on the disk
BITS = {"F32": 32.0, "F16": 16.02, "BF16": 16.02, "Q8_0": 8.52, "Q4_0": 4.85, "Q4_K_M": 5.1}  # per weight, about


def measured(planned: Plan) -> bool:
    """Whether the least blocks that a plan needs were measured here, but for files whose gate failed."""
    path = journal.journal_path(planned.study, planned.scale, journal.LOCAL)
    rows = journal.latest_rows(journal.read(path)) if path.exists() else []
    refused = {file for row in rows if row.refuses for file in row.cell.files}
    needed = [cell for cell in planned.cells[: planned.needed] if not refused.intersection(cell.files)]
    had, blocks = Counter(row.cell for row in rows), planned.least_blocks
    return bool(rows) and all(had[cell] >= blocks for cell in needed)


def lacking(plans: Iterable[Plan]) -> dict[str, int]:
    """Missing model files with the approximate bytes of each."""
    return {
        recipes.model_path(*file).name: int(registry.spec(*file[:2]).n_params * BITS.get(file[2], 8) / 8)
        for planned in plans
        for file in files.needed(planned)
        if file[1] != registry.GIVEN and not recipes.model_path(*file).exists()
    }


def missing(plans: Iterable[Plan]) -> dict[str, int]:
    """The files that are `lacking`; StudyError if the disk lacks room for them."""
    sizes = lacking(plans)
    paths.MODELS.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(paths.MODELS).free
    if sizes and sum(sizes.values()) + ROOM > free:
        why = f"model files of full size take {sum(sizes.values()) / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        raise StudyError(str(paths.MODELS), why, "free some space, or measure small models: make study SCALE=mini")
    return sizes
