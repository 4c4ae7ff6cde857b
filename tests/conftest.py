"""What all tests share: the embedded models, and cells to measure on them."""

import copy
import gc
import os
import sys
from pathlib import Path

import msgspec
import pytest
from darwin import mac as mac
from threadpoolctl import threadpool_limits
from xdist.scheduler import LoadFileScheduling

from llama_meter import children
from llama_meter.cells import KINDS, Cell
from llama_meter.measure import machine, plan, runner
from llama_meter.models import recipes, synthetic

HYBRID, ATTENTION = plan.MODELS
LONGEST = "cli publish live types alone quantize night probe engines oracle children scheduling replicas watch"
PAGES = ("test_any_rows", "test_live_pages")  # each test executes a page
collect_ignore = ["notebooks"]  # made to be published or refused, not to reproduce


def pytest_configure(config: pytest.Config) -> None:
    """Write the embedded models once, before xdist's workers start; keep each of these on one core.

    Two threads of the engine that wait for one another beside another test would take minutes. Hundreds of Pythons
    start, and none of them compiles the package anew: bytecode is kept even where the environment says otherwise.
    """
    _asked_once()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if not hasattr(config, "workerinput"):
        for name in plan.MODELS:
            synthetic.make(name, "mini", "F16")
    elif hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        number = int(config.workerinput["workerid"].removeprefix("gw"))
        os.sched_setaffinity(0, {cores[number % len(cores)]})
        threadpool_limits(1)  # numpy came before, and its threads spin


def _asked_once():
    """Sweeps of one process ask an engine once what it is, as long as nothing about it was replaced or set anew."""
    asked, answers = runner.engine_facts, {}

    def remembered(folder=""):
        key = folder, runner.work, machine.MACOS, os.environ.get("LLAMA_CPP_LIB_PATH")
        if key not in answers:
            answers[key] = asked(folder)
        return copy.deepcopy(answers[key])

    runner.engine_facts = remembered


@pytest.fixture(autouse=True, scope="module")
def settings_of_others():
    """What a file of tests leaves in the environment would be a fact of every engine asked after it."""
    before = children.settings(os.environ)
    yield
    assert children.settings(os.environ) == before


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is loaded stays, and need not be looked through again and again for what can be thrown away."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first and single pages last, so that no core waits at the end for the other's."""
    rank = {f"test_{name}": -1 for name in LONGEST.split()} | dict.fromkeys(PAGES, 1)
    items.sort(key=lambda item: rank.get(item.path.stem, 0))


@pytest.hookimpl(optionalhook=True)  # where xdist is switched off
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling:
    """A file goes to one worker, since its tests share fixtures, but the tests of PAGES go to any."""

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return nodeid if Path(file).stem in PAGES else file

    return Scheduling(config, log)


def mini(workload: str, model: str = HYBRID, **fields: object) -> Cell:
    """A cell on an embedded model, one thread, so that parallel tests do not wait for one another.

    It starts from 16 tokens.
    """
    fields_of = KINDS[workload].__struct_fields__
    before = next((name for name in ("n_prompt", "depth", "n_ctx", "n_tokens", "longer") if name in fields_of), "seed")
    usual = {"workload": workload, "model": model, "scale": "mini", "dtype": "F16", before: 16}
    return msgspec.convert(usual | fields, Cell)


def mini_file(model: str = HYBRID) -> Path:
    return recipes.model_path(model, "mini", "F16")
