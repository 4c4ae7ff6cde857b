"""What a user requests: from where rows come, how long to measure, and what to vary. Text is parsed here, once."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import islice, pairwise, takewhile
from typing import Any

from llama_meter.cells import File
from llama_meter.errors import StudyError

SOURCES = ("recorded", "live")
SCALES = ("mini", "shape")
DEVICES = ("auto", "cpu", "gpu")  # auto: on the GPU where the engine has one, and on its host's CPU beside it
MOST = 1 << 20  # tokens, sequences or threads
MOST_VALUES = 64  # of one parameter
BOUNDS = {"n_depth": (0, MOST), "n_gen": (0, MOST), "rates": (0.001, 10_000), "acceptance": (0, 1)}  # others from 1
REALS = ("rates", "acceptance")
RANGE = re.compile(r"(\d+)-(\d+)(?:([+*])(\d+))?")  # FIRST-LAST, FIRST-LAST+STEP, FIRST-LAST*FACTOR, as llama-bench's
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")  # of keys and of values
CHOICES = {"flash_attn": ("auto", "on", "off"), "type_k": CACHE_TYPES, "type_v": CACHE_TYPES}
SWITCH = {"1": "on", "0": "off", "true": "on", "false": "off"}  # as llama-bench and papermill write flash attention


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
        """The engine's settings that were requested, by the names that cells give them."""
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


NOTHING = Sweep()
VALUES = tuple(field.name for field in fields(Sweep))


@dataclass(frozen=True)
class Request:
    """Which rows: `source`, recorded ones or those measured here (live), at a `scale`, on a `device`.

    Live, `sweep` are the user's files and values, and `minutes` the longest time to measure for all that the notebook
    of a study shows; 0: as long as its plans take.
    """

    source: str = "recorded"
    scale: str = "shape"
    minutes: float = 0.0
    device: str = "auto"
    sweep: Sweep = NOTHING

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Request":
        """The request that parameters state, such as the `globals()` of a notebook; other names mean nothing here.

        Files are measured: their source is live. Raises StudyError for a value that makes no sense, or that recorded
        rows cannot have.
        """
        request: dict[str, Any] = {
            name: _one_of(name, values[name], known) for name, known in CHOSEN.items() if name in values
        }
        if "minutes" in values:
            request["minutes"] = _minutes(values["minutes"])
        cells = values.get("In", ())  # of a notebook: papermill's cell follows the one that declares parameters
        for declares, cell in pairwise(cells):
            if cell.startswith("# Parameters\n"):
                for name in dict.fromkeys(ASSIGNED.findall(cell)).keys() - set(ASSIGNED.findall(declares)):
                    print(f"-p {name}: this notebook has no such parameter, so nothing changes")
        varied = sweep(**{name: values[name] for name in VALUES if name in values})
        if varied.files:
            request["source"] = "live"
        made = cls(**request, sweep=varied)
        if made.source != "live" and varied != NOTHING:
            name, text = next(iter(varied.texts().items()))
            raise StudyError(f"{name} {text}", "is measured, and recorded rows are as they are", "add -p source live")
        return made

    def only(self, *names: str) -> "Request":
        """The same with these of the user's values."""
        return replace(self, sweep=Sweep(**{name: getattr(self.sweep, name) for name in names}))


ASSIGNED = re.compile(r"^(\w+)(?:: [^=]+)? = ", re.MULTILINE)
CHOSEN = {"source": SOURCES, "scale": SCALES, "device": DEVICES}


def sweep(**values: Any) -> Sweep:
    """A sweep from parameters as a notebook or a command gives them: text such as "128,512" or "1-16", numbers, lists.

    Files are checked and named (`check.requested`). Raises StudyError for an unknown parameter and for a value that
    makes no sense, before anything is measured.
    """
    if unknown := values.keys() - set(VALUES):
        raise StudyError(f"-p {min(unknown)}", "no study varies it", f"use one of {', '.join(sorted(VALUES))}")
    values = {name: value for name, value in values.items() if value not in (None, "", [], ())}
    if "draft_file" in values and "files" not in values:
        raise StudyError("draft_file", "drafts for files of yours, and none is named", "name a target with -p files")
    made = Sweep(**{name: _value(name, value) for name, value in values.items()})
    if len(made.draft_file) > 1:
        raise StudyError("draft_file", f"names {len(made.draft_file)} files", "name one model that drafts for all")
    if made.flash_attn == "off" and made.type_v not in ("", "f32", "f16", "bf16"):
        why = "needs flash attention, and it is off"
        raise StudyError(f"type_v {made.type_v}", why, "give -p flash_attn on, or -p type_v f16")
    return made


def _value(name: str, value: Any) -> Any:
    if name in ("files", "draft_file"):
        from llama_meter.models import check  # checking a file takes most of this package, and few name one

        return tuple(model.file for model in check.requested(value))
    if name in CHOICES:
        word = str(value).lower()
        return _one_of(name, SWITCH.get(word, word) if name == "flash_attn" else word, CHOICES[name])
    if name == "n_gpu_layers":
        return _number(name, str(value), int)
    words = [str(word).strip() for word in (value if isinstance(value, list | tuple) else str(value).split(","))]
    if name == "dtypes":
        return tuple(filter(None, words))
    return _numbers(name, value, list(filter(None, words)))


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise StudyError(f"{name} {value!r}", f"is unknown; known: {', '.join(known)}", "give one of these")
    return str(value)


def _minutes(value: Any) -> float:
    minutes = _number("minutes", str(value), float)
    if not 0 <= minutes < math.inf:
        raise StudyError(f"minutes {value}", "is no time", "give a number of minutes; 0: as long as it takes")
    return minutes


def _number(name: str, word: str, kind: type) -> Any:
    try:
        return kind(word)
    except ValueError:
        raise StudyError(f"{name} {word}", "is no number", f"give a number, such as -p {name} 1") from None


def _numbers(name: str, value: Any, words: Iterable[str]) -> tuple[float, ...]:
    """Numbers within the bounds of their name, in the order given, each once."""
    least, most = BOUNDS.get(name, (1, MOST))
    numbers: dict[float, None] = {}
    for word in words:
        numbers |= dict.fromkeys(_range(name, word))
    if wrong := [n for n in numbers if not least <= n <= most]:
        raise StudyError(f"{name} {wrong[0]:g}", f"is not within {least:g} and {most:,}", f"give another {name}")
    if len(numbers) > MOST_VALUES:
        why = f"has more than {MOST_VALUES} values, and each is measured several times"
        raise StudyError(f"{name} {value}", why, f"give fewer, such as -p {name} 1-16 or 128,512")
    return tuple(numbers)


def _range(name: str, word: str) -> Iterable[float]:
    match = RANGE.fullmatch(word)
    if name in REALS or not match:
        return [_number(name, word, float if name in REALS else int)]
    first, last, how, by = int(match[1]), int(match[2]), match[3] or "+", int(match[4] or 1)
    if last < first or by < 1 or (how == "*" and (by < 2 or first < 1)):
        raise StudyError(f"{name} {word}", "is no range", f"give one that ends, such as -p {name} 1-16 or 128-2048*2")
    steps = range(first, last + 1, by) if how == "+" else (first * by**n for n in range(last.bit_length() + 1))
    return islice(takewhile(lambda n: n <= last, steps), MOST_VALUES + 1)
