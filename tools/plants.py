"""Plant nine faults in a copy of this checkout, and ask of each the one test that should see it.

`python tools/plants.py` ends with exit code 1 where one is missed, and with an error where what it replaces is gone.
"""

import ast
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GENERATED = re.compile(r"<!-- (\w+): written.*?<!-- end of \1 -->", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.,/-])\d+[.,]?\d+(?![\w.,/-])")
Planted = tuple[Path, bytes, str]  # a file, its content with the fault, and the test's case: "" for all


def in_function(name: str, old: str, new: str) -> Planted:
    """Replace a text in the one function of the meter that has this name and this text."""
    found = []
    for path in sorted(Path("src/llama_meter").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        functions = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.FunctionDef)]
        sources = [ast.get_source_segment(text, each) or "" for each in functions if each.name == name]
        found += [(path, text.replace(each, each.replace(old, new)).encode(), "") for each in sources if old in each]
    if len(found) != 1:
        raise LookupError(f"{len(found)} functions {name}() hold {old!r}, not one: plant this fault anew")
    return found[0]


def pages() -> Iterator[tuple[Path, Any, list[Any]]]:
    """Every notebook, its content, and its outputs that are pictures."""
    for path in sorted(Path("notebooks").glob("*.ipynb")):
        page = json.loads(path.read_text(encoding="utf-8"))
        outputs = [output for cell in page["cells"] for output in cell.get("outputs", [])]
        yield path, page, [output for output in outputs if "image/png" in output.get("data", {})]


def exchanged(place: Callable[[Any], Any], field: str) -> Planted:
    """Exchange a field of the first two pictures that share a page."""
    path, page, pictures = next(each for each in pages() if len(each[2]) > 1)
    first, second = map(place, pictures[:2])
    first[field], second[field] = second[field], first[field]
    return path, json.dumps(page).encode(), path.stem


def mistyped(text: str) -> str:
    """A text whose first number of two digits and more has another last digit."""
    return NUMBER.sub(lambda number: number[0][:-1] + str((int(number[0][-1]) + 3) % 10), text, count=1)


def in_prose() -> Planted:
    """Change a number in a page's quotation."""
    for path, page, _ in pages():
        for cell in page["cells"]:
            right = "".join(cell["source"])
            if cell["cell_type"] == "markdown" and right.startswith(">") and mistyped(right) != right:
                cell["source"] = mistyped(right)
                return path, json.dumps(page).encode(), path.stem
    raise LookupError("no page quotes a number: plant this fault anew")


def in_readme() -> Planted:
    """Change a number of a finding, or of a paragraph that links a page, outside of what a tool writes."""
    path, found = Path("README.md"), False
    text = path.read_text(encoding="utf-8")
    for block in re.split(r"\n\s*\n", GENERATED.sub("", text)):
        found = block.startswith("## What it found") if block.startswith("## ") else found
        if (found or "](notebooks/" in block) and mistyped(block) != block:
            return path, text.replace(block, mistyped(block)).encode(), ""
    raise LookupError("README.md links no page beside a number: plant this fault anew")


def without_a_row(place: int) -> Planted:
    """Delete the last row of a journal."""
    path = sorted(Path("data/measured").glob("*/*.jsonl*"))[place]
    packed, data = path.suffix == ".gz", path.read_bytes()
    lines = (gzip.decompress(data) if packed else data).splitlines(keepends=True)
    del lines[max(number for number, line in enumerate(lines) if b'"kind":"row"' in line)]
    return path, gzip.compress(b"".join(lines)) if packed else b"".join(lines), ""


GATE = "test_gates.py::test_whole_logits_alone_see_a_fault_that_every_part_allows"
CLOCK = "test_workers.py::test_a_time_is_no_shorter_than_its_calls_and_no_longer_than_what_surrounds_them"
PICTURE = "test_committed.py::test_a_picture_and_its_alt_text_are_those_of_the_data_beside_them"
PROSE = "test_committed.py::test_a_number_in_prose_stands_in_an_output_of_its_section_or_is_listed"
README = "test_committed.py::test_every_number_of_readme_s_findings_stands_in_an_output_of_the_page_it_links"
ROWS = "test_committed.py::test_no_row_was_lost_or_changed"
PROMPT, STEP = "[clock() - start]", "np.diff(stamps).tolist()"
FAULTS: list[tuple[str, Callable[[], Planted], str]] = [
    ("whole logits always agree", lambda: in_function("gate", '_agrees": v.ok', '_agrees": True'), GATE),
    ("prompts' clock short", lambda: in_function("_prefill", PROMPT, "[(clock() - start) * 9 // 10]"), CLOCK),
    ("steps' clock short", lambda: in_function("time_steps", STEP, "(np.diff(stamps) * 9 // 10).tolist()"), CLOCK),
    ("pictures exchanged", lambda: exchanged(lambda output: output["data"], "image/png"), PICTURE),
    ("alt texts exchanged", lambda: exchanged(lambda output: output["metadata"]["image/png"], "alt"), PICTURE),
    ("a number in prose changed", in_prose, PROSE),
    ("a number in README changed", in_readme, README),
    ("a row deleted", lambda: without_a_row(0), ROWS),
    ("a row deleted elsewhere", lambda: without_a_row(-1), ROWS),
]


def fails(test: str) -> bool:
    """Whether a test fails in the copy; one that is not there does not. RuntimeError where pytest itself fails."""
    settings = os.environ | {"PYTHONPATH": str(Path("src").resolve()), "PLAMO_STUDY_ROOT": str(Path.cwd())}
    done = subprocess.run([sys.executable, "-m", "pytest", "-n", "0", test], env=settings, capture_output=True)
    if done.returncode not in (0, 1, 4):
        raise RuntimeError(done.stdout.decode() + done.stderr.decode())
    return done.returncode == 1


def main() -> int:
    """Print fault, test and verdict of each; 1 where one was missed."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    verdicts = []
    with tempfile.TemporaryDirectory() as copy:
        for name in (each for each in listed.split("\0") if (ROOT / each).is_file()):
            (Path(copy) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, Path(copy) / name)
        os.chdir(copy)
        for fault, plant, test in FAULTS:
            path, wrong, case = plant()
            right, test = path.read_bytes(), f"tests/{test}[{case}]" if case else f"tests/{test}"
            before = fails(test)
            path.write_bytes(wrong)
            verdicts.append("fails anyway" if before else "seen" if fails(test) else "MISSED")
            path.write_bytes(right)
            print(f"{verdicts[-1]}: {fault} -> {test}", flush=True)
        os.chdir(ROOT)
    return int(set(verdicts) != {"seen"})


if __name__ == "__main__":
    sys.exit(main())
