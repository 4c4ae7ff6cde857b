"""What a command is started with that it cannot work in, put right or refused before anything else is imported."""

import os
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

OURS = {"llama_meter", "plamo_study", "__pycache__"}


def prepare() -> None:
    """Refuse modules that PYTHONPATH puts in place of installed ones; mend a missing home and a width of nothing."""
    for name in ("COLUMNS", "LINES"):
        if not os.environ.get(name, "1").strip("0"):
            del os.environ[name]
    with suppress(RuntimeError):
        if Path.home().is_absolute():
            return _check_modules()
    os.environ["HOME"] = "/"  # a user without one: nothing is kept there
    return _check_modules()


def _check_modules() -> None:
    installed = sysconfig.get_path("purelib")
    names = (_names(installed) | set(sys.stdlib_module_names)) - OURS
    for folder in filter(os.path.isdir, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if not os.path.samefile(folder, installed) and (foreign := sorted(_names(folder) & names)):
            few = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
            print(f"PYTHONPATH: brings {few} from {folder}\n  mend: unset PYTHONPATH", file=sys.stderr)
            raise SystemExit(2)


def _names(folder: str) -> set[str]:
    """The modules that a folder holds."""
    entries = [(entry.name.partition(".")[0], entry) for entry in os.scandir(folder)]
    return {name for name, entry in entries if entry.name.endswith((".py", ".so")) or (name == entry.name)}
