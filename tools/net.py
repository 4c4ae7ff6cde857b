"""The net under the move of notebooks: every number they show, dumped, and a notebook compared with the dump.

    python tools/net.py dump                 # all notebooks at shape and mini, on recorded rows, into tools/net/
    python tools/net.py compare 01           # what notebook 01 shows now against the dump

Scaffolding: it goes when the last notebook has moved. A number is known by its value and not by its place, so a table
may become a chart. A number that is gone is listed with its labels, and with the new numbers that have the same labels.
"""

import argparse
import gzip
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
NET = ROOT / "tools" / "net"
SCALES = ("shape", "mini")
CLOSE = 1e-9
seen: list[dict[str, Any]] = []


def watch() -> None:
    """Note every table, claim and chart, before the modules that make them are imported."""
    from plamo_study.analysis import claims
    from plamo_study.present import labels, tables, theme

    make, judge, draw, label = tables.table, claims.family, theme.mimebundle, labels.table

    def table(data: pd.DataFrame, columns: Any, *args: Any, **named: Any) -> Any:
        note("table", data[[name for name in columns if name in data]])
        return make(data, columns, *args, **named)

    def labelled(found: pd.DataFrame, *args: Any, **named: Any) -> Any:
        made = label(found, *args, **named)
        note("frame", made.numbers)
        return made

    def family(entries: Any) -> pd.DataFrame:
        found = judge(entries)
        note("claims", found)
        return found

    def mimebundle(spec: dict[str, Any], **named: Any) -> Any:
        for data in spec.get("datasets", {}).values():
            note("chart", pd.DataFrame(data))
        return draw(spec, **named)

    tables.table, claims.family, theme.mimebundle, labels.table = table, family, mimebundle, labelled


def note(kind: str, frame: pd.DataFrame) -> None:
    """Keep every number of a frame."""
    for line in frame.to_dict("records"):
        seen.extend({"kind": kind} | number for number in numbers(line))


def numbers(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each number of a line of a table, with the words and whole numbers beside it as labels."""
    words = sorted({str(value) for value in line.values() if isinstance(value, str) or type(value) in (int, bool)})
    for name, value in line.items():
        if hasattr(value, "low") and hasattr(value, "level"):
            yield {"labels": words, "name": str(name), "value": [value.value, value.low, value.high, value.n]}
        elif isinstance(value, float) and math.isfinite(value):
            yield {"labels": words, "name": str(name), "value": [value]}


def run(path: Path, scale: str) -> list[dict[str, Any]]:
    """Everything a notebook shows at a scale on recorded rows."""
    from IPython.core.interactiveshell import InteractiveShell

    seen.clear()
    shell = InteractiveShell()
    for name in ("image/png", "text/markdown", "text/html"):
        shell.display_formatter.formatters[name].enabled = True
    shell.display_formatter.active_types = ["text/plain", "text/html", "text/markdown", "image/png"]
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "code":
            continue
        at = len(seen)
        ran = shell.run_cell(cell.source, store_history=False)
        if not ran.success:
            seen.append({"kind": "error", "labels": [], "name": str(ran.error_in_exec), "value": []})
            break
        if "parameters" in cell.metadata.get("tags", []):
            shell.run_cell(f"source, scale = 'recorded', {scale!r}", store_history=False)
        shown = ran.result
        numbers_of = getattr(shown, "numbers", shown)
        if isinstance(numbers_of, pd.DataFrame):
            note("frame", numbers_of)
        for line in getattr(shown, "lines", []):
            seen.extend({"kind": "claim"} | number for number in numbers(line))
        for entry in seen[at:]:
            entry["cell"] = cell.get("id", "")
    return list(seen)


def dump(path: Path) -> None:
    """Write what a notebook shows at every scale."""
    NET.mkdir(exist_ok=True)
    for scale in SCALES:
        found = run(path, scale)
        text = "".join(json.dumps(entry) + "\n" for entry in found)
        (NET / f"{path.stem}.{scale}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        broken = [entry["name"] for entry in found if entry["kind"] == "error"]
        print(path.stem, scale, len(found), "numbers", *broken, file=sys.stderr)


def compare(path: Path, scale: str, full: bool) -> int:
    """Print which dumped numbers the notebook shows no more; returns how many."""
    stored = gzip.decompress((NET / f"{path.stem}.{scale}.jsonl.gz").read_bytes()).decode().splitlines()
    before, now = [json.loads(line) for line in stored], run(path, scale)
    gone = [entry for entry in before if entry["value"] and not held(entry, now)]
    distinct = {(entry["kind"], entry["cell"], entry["name"]) for entry in gone}
    print(f"{path.stem} {scale}: {len(before) - len(gone)} of {len(before)} dumped numbers are shown")
    for kind, cell, name in sorted(distinct):
        of = [entry for entry in gone if (entry["kind"], entry["cell"], entry["name"]) == (kind, cell, name)]
        print(f"  {kind} {cell} {name}: {len(of)} gone")
        for entry in of if full else of[:3]:
            same = [e["value"] for e in now if set(entry["labels"]) <= set(e["labels"]) and e["name"] == entry["name"]]
            print(f"     {entry['labels']} {entry['value']}" + (f" now {same[:3]}" if same else ""))
    return len(gone)


def held(entry: dict[str, Any], now: list[dict[str, Any]]) -> bool:
    """Whether a number is among the new ones, in any power of ten or as a share of hundred, with its interval."""
    want = [value for value in entry["value"] if isinstance(value, float) and math.isfinite(value)]
    if not want:  # it has no value
        return True
    for other in now:
        for factor in (1, 1e3, 1e-3, 1e6, 1e-6, 1e9, 1e-9, 100, 0.01):
            alone = len(want) == 1 and any(math.isclose(v, want[0] * factor, rel_tol=CLOSE) for v in other["value"])
            if alone:  # a chart's bound may stand in a table's interval
                return True
            if other["value"] and math.isclose(other["value"][0], want[0] * factor, rel_tol=CLOSE):
                bounds = [v for v in other["value"] if isinstance(v, float) and math.isfinite(v)]
                if len(want) == 1 or all(any(math.isclose(b, w * factor, rel_tol=CLOSE) for b in bounds) for w in want):
                    return True
    return False


def main() -> None:
    """Dump or compare, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["dump", "compare"])
    parser.add_argument("notebooks", nargs="*", help="their first digits; all by default")
    parser.add_argument("--scale", default="shape")
    parser.add_argument("--full", action="store_true", help="list every number that is gone")
    asked = parser.parse_args()
    watch()
    paths = [path for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
             if not asked.notebooks or path.stem[:2] in asked.notebooks]  # fmt: skip
    for path in paths:
        dump(path) if asked.what == "dump" else compare(path, asked.scale, asked.full)


if __name__ == "__main__":
    main()
