"""Two runs at once: one wins, the other says who is at work, and a run that died is in nobody's way."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import nbformat
import psutil
import pytest
from test_cli import FEW, few, in_one_process

from llama_meter import journal, paths
from llama_meter.rows import Row
from plamo_study.cli.terminal import LOCK

COMMAND = [sys.executable, "-m", "plamo_study.cli.main"]
LONG_S = 60.0


@pytest.fixture
def root(tmp_path):
    """A project of one short notebook beside the first page."""
    for name in ("data", "README.md"):
        (tmp_path / name).symlink_to(paths.ROOT / name)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks/your-machine.ipynb").symlink_to(paths.NOTEBOOKS / "your-machine.ipynb")
    cells = [
        nbformat.v4.new_markdown_cell("# What is one and one?"),
        nbformat.v4.new_code_cell('source = "recorded"\nscale = "mini"', metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell("1 + 1"),
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), tmp_path / "notebooks/plain.ipynb")
    return tmp_path


def start(root, *arguments):
    environment = os.environ | {"PLAMO_STUDY_ROOT": str(root)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*COMMAND, *arguments], env=environment, **pipes)


def at_work(running, lock):
    """Wait until a run holds the lock, and stop it there."""
    end = time.monotonic() + LONG_S
    while time.monotonic() < end and str(running.pid) not in (lock.read_text() if lock.exists() else ""):
        time.sleep(0.01)
    running.send_signal(signal.SIGSTOP)
    assert running.poll() is None


SECOND = (("study", "--minutes", "0.01"), ("run", "plain", "-p", "source", "recorded"), ("publish",))


@pytest.mark.long
def test_of_two_runs_one_wins_the_other_says_who_is_at_work_and_a_killed_one_is_in_nobody_s_way(root):
    lock, command = root / "reports" / LOCK, ("run", "plain", "-p", "source", "recorded")
    killed = start(root, *command)
    at_work(killed, lock)
    left = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.communicate()
    for process in left:
        process.kill()
    assert str(killed.pid) in lock.read_text()
    first = start(root, *command)
    at_work(first, lock)
    for code, said in in_one_process(root, *SECOND):
        assert code == 2, said
        assert f"process {first.pid}" in said
    first.send_signal(signal.SIGCONT)
    _, said = first.communicate(timeout=LONG_S)
    assert first.returncode == 0, said
    assert (root / "reports/plain.ipynb").exists()


PAGE = """
from llama_meter.measure.request import Request
from plamo_study.measurements import measurements
len(measurements("01-phase-asymmetry", Request.of(globals())))
"""
STUDY = f"""{FEW}
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits it ignored
from plamo_study.cli import main
main.main()
"""


@pytest.fixture
def project(tmp_path):
    """A project whose one notebook shows a study that `run 01` measures first, in a minute."""
    for name in ("data/models.toml", "data/models", "data/published", "data/corpus", "data/measured/reference"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(paths.ROOT / name)
    (tmp_path / "README.md").symlink_to(paths.ROOT / "README.md")
    (tmp_path / "notebooks").mkdir()
    notebook = nbformat.read(paths.NOTEBOOKS / "01-phase-asymmetry.ipynb", as_version=4)
    notebook.cells = [*notebook.cells[:3], nbformat.v4.new_code_cell(PAGE)]
    nbformat.write(notebook, tmp_path / "notebooks/01-phase-asymmetry.ipynb")
    yield tmp_path
    for process in of_study(str(tmp_path)):
        process.kill()


def of_study(mark, word=""):
    """Processes that a study of this mark started, directly or not, with a word in their command."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # a zombie has neither an environment nor a command
            if process.environ().get("MARK") == mark and word in " ".join(process.cmdline()):
                found.append(process)
    return found


def until(true, seconds=LONG_S):
    end = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


@pytest.mark.whole
@pytest.mark.timeout(1200)
def test_a_study_killed_again_and_again_goes_on_without_a_lost_or_doubled_row_or_an_orphan(project):
    journal_path = project / "data/measured/local/01-phase-asymmetry.mini.jsonl"
    environment = os.environ | {"PLAMO_STUDY_ROOT": str(project), "MARK": str(project)} | few(project)
    command = [sys.executable, "-c", STUDY, "run", "01", "--scale", "mini", "--minutes", "9"]

    def keys():
        return [record.key for record in journal.read(journal_path) if isinstance(record, Row)]

    def rows_beyond(n):
        return lambda: journal_path.exists() and journal_path.read_bytes().count(b'{"kind":"row"') > n

    def in_the_notebook():
        return of_study(str(project), "ipykernel")

    done = []
    for sent, when in (
        (signal.SIGKILL, rows_beyond(1)),
        (signal.SIGINT, rows_beyond(4)),
        (signal.SIGTERM, rows_beyond(7)),
        (signal.SIGINT, in_the_notebook),
        (signal.SIGKILL, in_the_notebook),
    ):
        with (project / "said").open("w") as said:
            study = subprocess.Popen(command, env=environment, stderr=said, start_new_session=True)
        assert until(lambda when=when, study=study: when() or study.poll() is not None, 4 * LONG_S), (
            project / "said"
        ).read_text()
        os.killpg(study.pid, sent)
        assert study.wait(LONG_S)
        assert until(lambda: not of_study(str(project))), "what the study started ends with it"
        assert "Traceback" not in (project / "said").read_text()
        before, done = done, keys()
        assert len(done) == len(set(done)), "no row is doubled"
        assert set(before) <= set(done), "no row is lost"
        assert not [*(project / "reports").glob("01-phase-asymmetry.ipynb")], "no notebook that did not end looks done"
    for status in ("ok", "unchanged"):
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=9 * LONG_S)
        assert finished.returncode == 0, finished.stderr
        assert f"{status} 01-phase-asymmetry.ipynb" in finished.stderr
    assert set(done) <= set(keys())
    assert (project / "reports/01-phase-asymmetry.ipynb").exists()
