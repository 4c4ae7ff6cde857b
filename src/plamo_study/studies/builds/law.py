"""What each build answered: right, wrong, refused in words, or that it does not know what it was asked about."""

from typing import Any

import pandas as pd

from plamo_study.read.recording import Recording, read
from plamo_study.studies.builds.plan import SHARED, STUDY
from plamo_study.studies.right_answers.plan import short

UNKNOWN = "unknown to it"
BAD = ("wrong", "abort", "hang", "error", "killed")
COLUMNS = ["build", "version", "architecture", "question", "answer", "error"]
ORACLE = "oracle"  # the question of a gate


def answers(recording: Recording | None) -> pd.DataFrame:
    """One line a question and build, and a gate's too: `build`, `version` of llama-cpp-python, `architecture`,
    `question` (of a gate: ORACLE), `answer` and `error` (the largest relative one of logits).

    The released engine in use is its version too, so that it is one build with the release of that number.
    """
    rows = recording.rows if recording else pd.DataFrame()
    lines = [_line(row, recording.facts[row["engine"]]) for row in rows.to_dict("records")] if recording else []
    return pd.DataFrame(lines, columns=COLUMNS).drop_duplicates(COLUMNS[:4], keep="last")


def _line(row: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    version = engine["binding"].rpartition(" ")[2]
    build = version if row["build"] in ("stock", version) else row["build"]
    line = {
        "build": build,
        "version": version,
        "architecture": short(row["model"]),
        "question": row["question"] or ORACLE,
    }
    errors = [row["checks"][name] for name in ("error", "prefill_error", "decode_error") if name in row["checks"]]
    return line | {"answer": _answer(row), "error": max(errors, default=None)}


def _answer(row: dict[str, Any]) -> str:
    """What came of a question, in a word. What a build says it cannot load is unknown to it."""
    if row["status"] != "ok":
        return UNKNOWN if "llama.cpp cannot load" in row["failure"] else str(row["status"])
    if row["checks"].get("refused"):
        return "refused"
    return "wrong" if row["verdict"] == "invalid" or row["checks"].get("wrong") else "right"


def safe(outcomes: pd.DataFrame) -> bool:
    """Whether users may share: each question that a server raises was asked, and answered rightly or refused."""
    of = outcomes[outcomes.question.isin(SHARED)]
    return set(of.question) == set(SHARED) and not of.answer.isin([*BAD, UNKNOWN]).any()


def may_share(architecture: str, build: str) -> bool | None:
    """Whether users may share a server of this architecture and build, by the recorded answers; None: not asked.

    `build`: a release's number, or the name of a build.
    """
    every = answers(read(STUDY, "recorded", "mini"))
    of = every[(every.architecture == architecture) & (every.build == build)]
    return safe(of) if of.question.isin(SHARED).any() else None
