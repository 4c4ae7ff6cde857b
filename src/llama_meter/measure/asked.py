"""What a user asks a study to vary: files, lengths, numbers of sequences, types and settings of the engine."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from llama_meter.cells import File
from llama_meter.errors import StudyError

MOST = 1 << 20  # tokens, sequences or threads
MOST_VALUES = 64  # of one parameter
REALS = {  # bounds, what it is, and some
    "rates": (0.001, 10_000, "number of requests a second", "0.5,1,2"),
    "acceptance": (0, 1, "share", "0.5,0.7"),
}
RANGE = re.compile(r"(\d+)-(\d+)(?:([+*])(\d+))?")  # FIRST-LAST, FIRST-LAST+STEP, FIRST-LAST*FACTOR, as llama-bench's
FLASH = {"auto": "auto", "on": "on", "off": "off", "1": "on", "0": "off", "true": "on", "false": "off"}
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")  # of keys and of values


@dataclass(frozen=True)
class Sweep:
    """Values of a study's parameters; what is empty is the study's own choice.

    `n_prompt`, `n_gen`: tokens read and written. `n_seq`: sequences evaluated together. `n_depth`: tokens before a
    decode step. `n_chunk`: tokens of a prompt that a call reads.
    `n_clients`: requests at a time. `rates`: requests a second. `dtypes`: types of the models that the repository
    brings. `n_draft`: tokens of a draft. `acceptance`: how likely a drafted token is right. `draft_file`: the model
    that drafts for `files`, at most one. `seed`: of drawn batches. `blocks`: processes of every cell, one number.
    `n_threads`, `n_gpu_layers` (-1: all), `flash_attn`, `type_k`, `type_v`: the engine's settings for every cell.
    """

    files: tuple[File, ...] = ()
    n_prompt: tuple[int, ...] = ()
    n_gen: tuple[int, ...] = ()
    n_seq: tuple[int, ...] = ()
    n_depth: tuple[int, ...] = ()
    n_chunk: tuple[int, ...] = ()
    n_clients: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    n_threads: tuple[int, ...] = ()
    n_gpu_layers: int | None = None
    flash_attn: str = ""
    type_k: str = ""
    type_v: str = ""
    n_draft: tuple[int, ...] = ()
    acceptance: tuple[float, ...] = ()
    draft_file: tuple[File, ...] = ()
    blocks: tuple[int, ...] = ()
    seed: tuple[int, ...] = ()

    def settings(self) -> dict[str, Any]:
        """The engine's settings that were asked for, by the names that cells give them."""
        named = {name: getattr(self, name) for name in ("n_gpu_layers", "flash_attn", "type_k", "type_v")}
        return {name: value for name, value in named.items() if value not in (None, "")}

    def texts(self) -> dict[str, str]:
        """The values, without files, as a notebook or a command takes them."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "files"}
        return {
            name: ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            for name, value in values.items()
            if value not in (None, "", ())
        }

    def options(self) -> list[str]:
        """The values, without files, as options of a command."""
        return [f"-p {name} {text}" for name, text in self.texts().items()]


NOTHING = Sweep()


def sweep(**asked: Any) -> Sweep:
    """A sweep from parameters as a notebook or a command gives them: text such as "128,512" or "1-16", numbers, lists.

    Files are read, checked and named (`given.give`). Raises StudyError for an unknown parameter and for a value that
    makes no sense, before anything is measured.
    """
    names = {field.name for field in fields(Sweep)}
    if unknown := asked.keys() - names:
        raise StudyError(f"-p {min(unknown)}", "no study varies it", f"use one of {', '.join(sorted(names))}")
    values = {name: value for name, value in asked.items() if value not in (None, "", [], ())}
    read: Mapping[str, Callable[[str, Any], Any]] = {
        "files": _files,
        "draft_file": _drafter,
        "rates": _reals,
        "acceptance": _reals,
        "dtypes": lambda name, value: tuple(_words(value)),
        "flash_attn": _flash,
        "type_k": _cache,
        "type_v": _cache,
        "n_gpu_layers": _layers,
    }
    if "draft_file" in values and "files" not in values:
        raise StudyError("draft_file", "drafts for files of yours, and none is given", "name a target with -p files")
    asked_for = Sweep(**{name: read.get(name, _numbers)(name, value) for name, value in values.items()})
    if asked_for.flash_attn == "off" and asked_for.type_v not in ("", "f32", "f16", "bf16"):
        why = "needs flash attention, and it is off"
        raise StudyError(f"type_v {asked_for.type_v}", why, "give -p flash_attn on, or -p type_v f16")
    return asked_for


def _words(value: Any) -> list[str]:
    texts = value if isinstance(value, list | tuple) else str(value).split(",")
    return [word for word in (str(text).strip() for text in texts) if word]


def _numbers(name: str, value: Any) -> tuple[int, ...]:
    """Whole numbers of at least 1 (a depth: 0), in the order given, each once."""
    numbers: list[int] = []
    for word in _words(value):
        numbers += _range(name, word)
    least = 0 if name in ("n_depth", "n_gen") else 1
    if wrong := [n for n in numbers if not least <= n <= MOST]:
        raise StudyError(f"{name} {wrong[0]}", f"is not within {least} and {MOST:,}", f"give another {name}")
    if len(set(numbers)) > MOST_VALUES:
        why = f"has {len(set(numbers))} values, more than {MOST_VALUES}, and each is measured several times"
        raise StudyError(f"{name} {value}", why, f"give fewer, such as -p {name} 1-16 or 128,512")
    return tuple(dict.fromkeys(numbers))


def _range(name: str, word: str) -> Iterable[int]:
    if re.fullmatch(r"-?\d+", word):
        return [int(word)]
    if not (match := RANGE.fullmatch(word)):
        mend = f"give whole numbers with commas or a range, such as -p {name} 128,512 or -p {name} 1-16"
        raise StudyError(f"{name} {word}", "is no number", mend)
    first, last, how, by = int(match[1]), int(match[2]), match[3] or "+", int(match[4] or 1)
    if last < first or by < 1 or (how == "*" and (by < 2 or first < 1)) or last > MOST:
        raise StudyError(f"{name} {word}", "is no range", f"give one that ends, such as -p {name} 1-16 or 128-2048*2")
    if how == "+":
        return range(first, min(last, first + by * MOST_VALUES) + 1, by)
    values = [first]
    while values[-1] * by <= last:
        values.append(values[-1] * by)
    return values


def _files(name: str, value: Any) -> tuple[File, ...]:
    from llama_meter.models import given  # checking a file takes most of this package, and few ask for one

    return tuple(model.file for model in given.give(value))


def _drafter(name: str, value: Any) -> tuple[File, ...]:
    files = _files(name, value)
    if len(files) != 1:
        raise StudyError(f"{name} {value}", f"names {len(files)} files", "give one model that drafts for all files")
    return files


def _reals(name: str, value: Any) -> tuple[float, ...]:
    """Finite numbers within the bounds of their name, in the order given, each once."""
    least, most, what, some = REALS[name]
    mend = f"give such numbers with commas, as -p {name} {some}"
    numbers: list[float] = []
    for word in _words(value):
        try:
            number = float(word)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise StudyError(f"{name} {word}", f"is no {what} between {least:g} and {most:,}", mend)
        numbers.append(number)
    if len(set(numbers)) > MOST_VALUES:
        raise StudyError(f"{name} {value}", f"has more than {MOST_VALUES} values", mend)
    return tuple(dict.fromkeys(numbers))


def _flash(name: str, value: Any) -> str:
    word = str(value).lower()
    if word not in FLASH:
        raise StudyError(f"{name} {value}", "is unknown", "give on, off or auto")
    return FLASH[word]


def _cache(name: str, value: Any) -> str:
    word = str(value).lower()
    if word not in CACHE_TYPES:
        raise StudyError(f"{name} {value}", f"is no type of a cache; known: {', '.join(CACHE_TYPES)}", "give one")
    return word


def _layers(name: str, value: Any) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise StudyError(f"{name} {value}", "is no whole number", "give a number of layers, or -1 for all") from None
