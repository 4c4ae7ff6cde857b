"""The known models and their local files: licence, pin, files, hashes and findings of every model and scale.

It reads only names, sizes, records and short files, so it answers at once. For a large model file it shows a hash or
findings only if `record` kept them for the bytes that are there now.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llama_meter import paths
from llama_meter.disk import growing, parsed
from llama_meter.models import snapshots, tensors
from llama_meter.models.finding import SEVERITIES
from llama_meter.models.registry import ModelSpec

SHORT = 64 << 20  # bytes up to which a file is hashed on the spot


@dataclass(frozen=True)
class FileHere:
    """One file, or one snapshot of released files: `kind` is its type or recipe, or "released" with the commit.

    `sha256` is "" until the whole file has been read; for a snapshot it is that of the largest file.
    `checked`: what the last check found ("1 blocking, 2 warning", "nothing found"), "" where none is recorded.
    """

    path: str
    kind: str
    size: int
    sha256: str
    checked: str


@dataclass(frozen=True)
class Entry:
    """One model at one scale. `pin`: "pinned", "revision only", "unpinned", or "" where there is nothing to pin."""

    spec: ModelSpec
    licence: str
    gated: bool
    pin: str
    files: tuple[FileHere, ...]


def entries(models: dict[tuple[str, str], ModelSpec]) -> list[Entry]:
    """Every registered model and scale, and scale "weights" for every released one, in the order of the registry."""
    specs = dict(models)
    for (name, scale), spec in models.items():
        if scale == "shape" and spec.hub:
            specs.setdefault((name, "weights"), replace(spec, scale="weights", sha256={}))
    order = list(dict.fromkeys(name for name, _ in models))
    return [_entry(spec) for _, spec in sorted(specs.items(), key=lambda item: order.index(item[0][0]))]


def as_dict(entry: Entry) -> dict[str, Any]:
    """An entry as JSON holds it: the fields of its spec, `n_params`, licence, gated, pin, `here` (kinds) and files."""
    return asdict(entry.spec) | {
        "n_params": entry.spec.n_params,
        "licence": entry.licence,
        "gated": entry.gated,
        "pin": entry.pin,
        "here": [file.kind for file in entry.files],
        "files": [asdict(file) for file in entry.files],
    }


def _entry(spec: ModelSpec) -> Entry:
    files = tuple(_ggufs(spec))
    if spec.scale != "weights" or spec.hub is None:
        licence = "MIT, trained on PSF-licensed text" if spec.trained else "none: synthetic"
        return Entry(spec, licence, False, "pinned" if spec.sha256 else "", files)
    return Entry(spec, spec.hub.licence, spec.hub.gated, snapshots.pinned(spec.hub), (*_released(spec.name), *files))


def _ggufs(spec: ModelSpec) -> Iterator[FileHere]:
    start = f"{spec.name}.{spec.scale}."
    for path in sorted(p for p in paths.MODELS.glob(f"{start}*.gguf")):
        kind, size = path.name.removeprefix(start).removesuffix(".gguf"), path.stat().st_size
        sha256, summary = recorded(path)
        if not sha256 and size <= SHORT:
            sha256 = tensors.sha256(path)
        pin = spec.sha256.get(kind)
        summary = "differs from its pin" if sha256 and pin and sha256 != pin else summary
        yield FileHere(str(path), kind, size, sha256, summary)


def _released(name: str) -> Iterator[FileHere]:
    for snapshot in snapshots.held(name):
        folder = snapshots.folder_of(name, snapshot.revision)
        largest = max(snapshot.files.values(), key=lambda file: file.size)
        sizes = {file: held.size for file, held in snapshot.files.items()}
        whole = all((folder / f).is_file() and (folder / f).stat().st_size == size for f, size in sizes.items())
        kind = f"released {snapshot.revision[:8]}, {len(snapshot.files)} files"
        checked = "" if whole else "incomplete: fetch again"
        yield FileHere(str(folder), kind, snapshot.size, largest.sha256, checked)


# ---------------------------------------------------------------- findings recorded beside the file


def record(path: Path, sha256: str, findings: Iterable[Mapping[str, str]]) -> Path:
    """Keep what a check found beside a model file, as <file>.findings.json, and return that path.

    `findings` are the fields of each, `severity` among them; `sha256` is the file's, "" if not computed.
    """
    stat, rows = path.stat(), [dict(finding) for finding in findings]
    content = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256, "findings": rows}
    target = _record_path(path)
    with growing(target) as partial:
        partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return target


def recorded(path: Path) -> tuple[str, str]:
    """The recorded SHA-256 of a file and a summary of its findings; empty where none hold for the bytes there now."""
    try:
        content = parsed(_record_path(path).read_bytes())
        severities = [finding["severity"] for finding in content["findings"]]
        same = (content["size"], content["mtime_ns"]) == (path.stat().st_size, path.stat().st_mtime_ns)
        sha256 = str(content["sha256"])
    except FileNotFoundError:
        return "", ""
    except (OSError, ValueError, KeyError, TypeError):
        return "", "record damaged: check again"
    if not same:
        return "", "changed since: check again"
    counts = [f"{severities.count(severity)} {severity}" for severity in SEVERITIES if severity in severities]
    return sha256, ", ".join(counts) or "nothing found"


def _record_path(path: Path) -> Path:
    return path.with_name(path.name + ".findings.json")
