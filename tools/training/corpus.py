"""The training text: the running Python's standard library, and the modules of it that are held out.

A hash of its path decides whether a module is held out. Excluded are test suites (many installations lack them), what
pip installs, files that are mostly tables of literals, files that are not UTF-8, and exact duplicates.

It knows no tokens.
"""

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SALT = "plamo-study/3"  # the first that holds out 150 to 250 kB, at least 12 modules, none of them above a quarter
ONE_IN = 40  # one module in this many is held out
NO_PART = {"site-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"}
TABLE_LINE = re.compile(r"\s*(?:['\"](?!['\"]{2})|0[xX]|\d|\()")  # begins with a text, a number or a tuple
LONG_TEXT = 20  # words from which a docstring counts as prose
LONG_LINE = 40  # characters from which a repeated line is hardly chance


@dataclass(frozen=True)
class Module:
    """One source file: its path below the standard library, with forward slashes, and its text."""

    path: str
    text: str

    @property
    def n_bytes(self) -> int:
        """Length as UTF-8."""
        return len(self.text.encode())


def modules(root: Path | None = None) -> list[Module]:
    """The modules below `root` (default: this Python's standard library), sorted by path, without the excluded ones."""
    root = root or Path(sysconfig.get_path("stdlib"))
    found: dict[str, Module] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if NO_PART & set(parts[:-1]):
            continue
        text = _text(path)
        if text and not is_table(text):
            found.setdefault(text, Module("/".join(parts), text))
    return sorted(found.values(), key=lambda module: module.path)


def is_table(text: str) -> bool:
    """Whether most lines are entries of a table: codecs' character maps, error lists, help topics."""
    lines = [line for line in text.splitlines() if line.strip()]
    return sum(bool(TABLE_LINE.match(line)) for line in lines) > len(lines) / 2


def is_held_out(path: str) -> bool:
    """Whether a module is held out, by its path alone: SHA-256 of salt and path, modulo `ONE_IN`."""
    digest = hashlib.sha256(f"{SALT}/{path}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % ONE_IN == 0


def split(found: Iterable[Module]) -> tuple[list[Module], list[Module]]:
    """Training part and held-out part."""
    held_out = [module for module in found if is_held_out(module.path)]
    return [module for module in found if not is_held_out(module.path)], held_out


def prose(found: Iterable[Module]) -> str:
    """The English of modules: their docstrings of at least LONG_TEXT words, in order, an empty line after each."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for module in found for node in ast.walk(ast.parse(module.text)) if isinstance(node, kinds)]
    texts = [text for node in nodes if (text := ast.get_docstring(node)) and len(text.split()) >= LONG_TEXT]
    return "".join(f"{text}\n\n" for text in texts)


def sha256(found: Iterable[Module]) -> str:
    """One hash of paths and texts, in order."""
    digest = hashlib.sha256()
    for module in found:
        digest.update(f"{module.path}\0{module.n_bytes}\0{module.text}".encode())
    return digest.hexdigest()


def seen_before(train: Iterable[Module], held_out: Iterable[Module]) -> float:
    """Share of the held-out lines of at least 40 characters (without indentation) that the training part holds too."""
    known = {line for module in train for line in _long_lines(module.text)}
    lines = [line for module in held_out for line in _long_lines(module.text)]
    return sum(line in known for line in lines) / max(1, len(lines))


def _long_lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.splitlines()) if len(line) >= LONG_LINE]


def _text(path: Path) -> str:
    """The unchanged text of a file, "" when it is not UTF-8."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        return ""
