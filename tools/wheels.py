"""Does every locked package have a wheel for a Mac? Asks pip for each Python that set-up accepts, and installs nothing.

python tools/wheels.py                         # Python 3.11 to 3.14 on Apple silicon, macOS 14
python tools/wheels.py --python 3.12           # one of them
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement

from llama_meter import paths
from plamo_study.cli.guard import guarded

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORM = "macosx_14_0_arm64"  # pip takes wheels for older versions too, and universal ones
BUILT = "llama-cpp-python"  # from its sources, on every machine
ENTRY = re.compile(
    r"^(?P<line>[A-Za-z0-9][^\n\\]*?)(?: \\)?\n(?P<hashes>(?:[ \t]+--hash=\S+(?: \\)?\n)+)", re.MULTILINE
)


def locked(python: str) -> Iterator[str]:
    """The lines of requirements.lock, with hashes, that apply to a Mac with this Python, without their markers."""
    mac = {
        "sys_platform": "darwin", "platform_machine": "arm64", "platform_system": "Darwin", "os_name": "posix",
        "implementation_name": "cpython", "platform_python_implementation": "CPython", "python_version": python,
        "python_full_version": f"{python}.0",
    }  # fmt: skip
    for entry in ENTRY.finditer((paths.ROOT / "requirements.lock").read_text(encoding="utf-8")):
        asked = Requirement(entry["line"])
        if asked.name != BUILT and (asked.marker is None or asked.marker.evaluate(mac)):
            hashes = " ".join(re.findall(r"--hash=\S+", entry["hashes"]))
            yield f"{asked.name}{asked.specifier} {hashes}"


def wheels(python: Annotated[list[str] | None, typer.Option(help="such as 3.12; repeatable")] = None) -> None:
    """Exit code 1 where a Python lacks a wheel of any locked package."""
    missing = False
    for version in python or PYTHONS:
        lines = list(locked(version))
        with tempfile.TemporaryDirectory() as folder:
            asked = Path(folder, "requirements.txt")
            asked.write_text("\n".join(lines) + "\n")
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--dry-run",
                "--quiet",
                "--no-deps",
                "--ignore-installed",
            ]
            command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", version]
            # pip holds what a wheel requires against the Python that runs it, not against the one asked for
            command += ["--platform", PLATFORM, "--ignore-requires-python", "--target", folder, "-r", str(asked)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        missing |= done.returncode != 0
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        print(f"Python {version}: {len(lines)} packages, {'; '.join(errors) if done.returncode else 'a wheel of each'}")
    raise typer.Exit(int(missing))


if __name__ == "__main__":
    guarded(lambda: typer.run(wheels))
