"""Measure llama.cpp on PLaMo models. Exit codes: 0 done, 1 something failed, 2 wrong usage."""

# Modules that load Jupyter or SciPy are imported by the commands that need them: the others start a second sooner.

import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from plamo_study import paths
from plamo_study.cli import (
    at_hand as cli_at_hand,
    engine as cli_engine,
    models as cli_models,
    report,
    rows as cli_rows,
    server as cli_server,
    trace as cli_trace,
)
from plamo_study.cli.alone import alone
from plamo_study.cli.guard import guarded
from plamo_study.cli.options import (
    LIMIT,
    Accept,
    Engine,
    Force,
    Json,
    Minutes,
    Scale,
    accept_findings,
    finite,
    use_engine,
)
from plamo_study.cli.terminal import echo
from plamo_study.engine import builds as engines
from plamo_study.errors import StudyError
from plamo_study.measure import bench, machine, plan, recording, runner
from plamo_study.studies import at_hand, budget, cluster, registry as studies

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(cli_models.app, name="models")
app.add_typer(cli_engine.app, name="engine")
app.add_typer(cli_rows.app, name="rows")
app.add_typer(cli_server.app, name="server")
app.command("trace")(cli_trace.trace)
app.command("probe")(cli_server.probe)

NOTEBOOK_S = 15.0  # to execute one, about
NOTEBOOK_BYTES = 1 << 30  # of a kernel and what runs it: a third of that on recorded rows
MINUTES, AT_MOST = 3.0, 15.0  # for measuring all studies at mini, and for what their findings need alone
LOCK = ".running"  # in reports/
OWN = "own"  # the parameter of notebooks that can set this machine's rows beside the recorded ones


def main() -> None:
    """Run the command line."""
    guarded(lambda: app(report.joined_parameters(sys.argv[1:])))


@app.command()
def study(
    scale: Annotated[
        str | None,
        typer.Option(
            help="run every notebook live instead, at this scale: mini (embedded, minutes), shape or weights (hours)"
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=finite,
            help=f"minutes for measuring, {LIMIT}; 0: what the plans take. By default {at_hand.MINUTES:g}, or with a "
            f"scale about {MINUTES:g} at mini, at most {AT_MOST:g}, else what the plans take",
        ),
    ] = None,
    engine: Engine = None,
    force: Force = False,
) -> None:
    """Measure the core of the study on models of full size here, and publish its pages with your numbers on them."""
    use_engine(engine)
    if scale is None:
        raise typer.Exit(_run_at_hand(minutes, force))
    usual = minutes is None and scale == "mini"
    minutes, at_most = (MINUTES, AT_MOST) if usual else (minutes or 0, 0.0)
    raise typer.Exit(_run_all([], scale, "live", {}, minutes, force, published=True, at_most=at_most))


@app.command()
def run(
    notebooks: Annotated[list[str] | None, typer.Argument(help="numbers, names or paths; none means all")] = None,
    scale: Annotated[
        str | None, typer.Option(help="mini, shape or weights; default: mini; recorded rows: the page's scale")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(help="live (default): measure missing rows here; recorded: read the tracked rows"),
    ] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            "-p", metavar="NAME VALUE", help="a notebook parameter; source, scale and minutes are also options"
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, callback=finite, help=f"minutes for measuring, {LIMIT}; by default no limit")
    ] = None,
    engine: Engine = None,
    accept: Accept = None,
    force: Force = False,
    json: Json = False,
    hosts: Annotated[
        Path | None,
        typer.Option(help="measure over SSH on the hosts of this file instead; they can only send rows"),
    ] = None,
    divide: Annotated[bool, typer.Option(help="run each study on only one host, whichever is free")] = False,
) -> None:
    """Measure what is missing, then execute notebooks with papermill into reports/."""
    accept_findings(accept)
    use_engine(engine)
    if divide and not hosts:
        raise StudyError("--divide", "divides studies among hosts, but no hosts are given", "add --hosts FILE")
    if hosts and (engine or accept or force or json or parameter or source):
        why = "measures with the installation on the hosts and executes no notebooks"
        raise StudyError("--hosts", why, "omit everything except NOTEBOOKS, --scale, --minutes and --divide")
    if hosts:
        raise typer.Exit(_run_on(hosts, notebooks or [], scale or "mini", minutes or 0, divide))
    values = dict(report.name_and_value(text) for text in parameter or [])
    source = _one_of("source", source, values) or "live"
    scale = _one_of("scale", scale, values) or ("mini" if source == "live" else None)
    asked = _one_of("minutes", None if minutes is None else f"{minutes:g}", values) or "0"
    raise typer.Exit(_run_all(notebooks or [], scale, source, values, _minutes(asked), force, json))


def _one_of(name: str, option: str | None, values: dict[str, str]) -> str | None:
    """An option, or the notebook parameter of the same name, which is removed from `values`: both mean the same."""
    given = values.pop(name, None)
    if option is not None and given is not None and option != given:
        raise StudyError(f"-p {name} {given}", f"--{name} {option} says something else", "give one of the two")
    return option if given is None else given


def _minutes(text: str) -> float:
    from plamo_study.publish import parameters
    from plamo_study.studies import allowed

    minutes = float(parameters.convert("minutes", text, "float"))
    allowed.check(minutes=minutes)
    return minutes


@app.command()
def measure(
    name: Annotated[str, typer.Argument(metavar="STUDY", help="study, e.g. 01-phase-asymmetry")],
    scale: Scale = "mini",
    minutes: Minutes = 0,
    reference: Annotated[bool, typer.Option(help="write to the tracked journal of the reference machine")] = False,
    retry_failed: Annotated[bool, typer.Option(help="repeat rows that crashed, hung or were killed")] = False,
    engine: Engine = None,
    beside: Annotated[
        list[str] | None,
        typer.Option(help="another build to compare, by name or folder, measured in the same blocks"),
    ] = None,
    accept: Accept = None,
    json: Json = False,
    scheduler: Annotated[
        str | None,
        typer.Option(help="address of a Dask scheduler; its workers simulate, and you trust them"),
    ] = None,
) -> None:
    """Measure a study without its notebook; completed cells are skipped."""
    use_engine(engine)
    accept_findings(accept)
    builds = [engines.resolve(build) for build in beside or []]
    place = report.place(reference)
    with cluster.connected(scheduler) if scheduler else nullcontext() as elsewhere:
        summary = report.measure(name, scale, place, retry_failed, builds, minutes, elsewhere)
    if json:
        _print_rows(summary)
    raise typer.Exit(1 if summary.unexpected or summary.lacking else 0)


@app.command()
def publish() -> None:
    """Write an offline HTML page for each executed notebook in reports/, and an index."""
    with alone(paths.REPORTS / LOCK) if paths.REPORTS.is_dir() else nullcontext():
        _publish()


def _publish() -> None:
    from plamo_study.publish import pages

    executed = sorted(path for path in paths.REPORTS.glob("*.ipynb") if not path.name.endswith(".partial.ipynb"))
    for page in pages.publish(executed, paths.REPORTS):
        report.console.print(f"published {report.short(page)}")


@app.command()
def quality(
    text: Annotated[str, typer.Argument(help="a text of data/corpus, or any UTF-8 file")] = "python-heldout",
    scale: Scale = "mini",
    engine: Engine = None,
    accept: Accept = None,
) -> None:
    """Compare every type and recipe with F16 on a text: perplexity, KL divergence, loops."""
    from plamo_study.cli import report_quality
    from plamo_study.studies.quality import analysis as figures, plan as plan_quality

    use_engine(engine)
    accept_findings(accept)
    planned = plan_quality.quality(scale, bench.engine_facts()["gpu_offload"], text)
    path = recording.journal_path(planned.study, planned.scale, recording.LOCAL)
    summary = report.sweep(planned, path)
    table = figures.table(recording.framed(summary, path)[0])
    if not table.empty:
        report_quality.quality(table)
    raise typer.Exit(1 if summary.unexpected else 0)


@app.command()
def readme(check: Annotated[bool, typer.Option(help="only check whether it is up to date")] = False) -> None:
    """Write the README's findings from the recorded rows."""
    from plamo_study.publish import readme as readme_page

    current = readme_page.is_current() if check else readme_page.write()
    raise typer.Exit(0 if current else 1)


def _run_all(
    notebooks: list[str],
    scale: str | None,
    source: str,
    values: dict[str, str],
    minutes: float,
    force: bool,
    json: bool = False,
    published: bool = False,
    at_most: float = 0.0,
) -> int:
    """Measure every notebook's studies, then execute the notebooks side by side; returns the exit code.

    Without a scale, each notebook runs at its own.

    Raises StudyError, before anything is measured, for invalid arguments and while another run is active. `at_most`: a
    larger limit than `minutes`, for the rows that findings need. Unchanged notebooks are neither measured nor executed
    again. The first notebook is executed at once, so that it can be read while the rest is measured.
    """
    from plamo_study.publish import parameters
    from plamo_study.studies import allowed

    values = {"source": source} | ({"scale": scale} if scale else {}) | values
    scale = scale or studies.RANDOM_WEIGHTS
    allowed.check(source=source, scale=scale)
    found = _in_order(notebooks)
    for path, assigned in parameters.assign(found, values).items():
        if path.stem in studies.NOTEBOOKS:
            allowed.check(**assigned)
    with alone(paths.REPORTS / LOCK):
        return _run_alone(found, scale, source, values, minutes, force, json, published, at_most)


def _in_order(notebooks: list[str]) -> list[Path]:
    """Notebooks by number, with those that show the rows of all others last."""
    from plamo_study.publish import runs

    return sorted(runs.find_notebooks(notebooks), key=lambda path: path.stem in studies.OF_ALL)


def _run_at_hand(minutes: float | None, force: bool) -> int:
    """Measure the rows that pages show beside the recorded ones, and publish those pages with them; the exit code."""

    with alone(paths.REPORTS / LOCK):
        well = cli_at_hand.measure(minutes)
        scale, values = studies.RANDOM_WEIGHTS, {"source": "recorded"}  # each notebook at the scale it is recorded at
        status = _run_alone(_in_order([]), scale, "recorded", values, 0, force, json=False, published=True, at_most=0)
    return status or int(not well)


def _run_alone(
    found: list[Path],
    scale: str,
    source: str,
    values: dict[str, str],
    minutes: float,
    force: bool,
    json: bool,
    published: bool,
    at_most: float,
) -> int:
    from plamo_study.publish import inputs, parameters, runs

    shares = budget.of_notebooks([path.stem for path in found], scale, minutes)
    live = source == "live"
    measured = {path.stem: budget.of_notebook(path.stem, scale, shares[path.stem]) if live else [] for path in found}
    steps = report.Steps(
        [budget.lasts(*each) for path in found for each in measured[path.stem]] + [NOTEBOOK_S] * len(found)
    )
    failed, results, left = False, [], []
    for notebook in found:
        wrong = False
        limited = live and "minutes" in parameters.declared(notebook)
        own = values | ({"minutes": repr(shares[notebook.stem])} if limited else {})
        own |= _as_recorded(notebook.stem, scale) if published else {}
        own |= {OWN: "true"} if published and OWN in parameters.declared(notebook) else {}
        digest = inputs.digest(notebook.stem)
        current = runs.is_current(notebook, own, paths.REPORTS, digest)
        if not live or (current and not (force or json)):
            steps.skip(len(measured[notebook.stem]))
        else:
            for study, at, share in measured[notebook.stem]:
                steps.begin(f"measuring {study}")
                try:
                    summary = report.measure(
                        study, at, recording.LOCAL, minutes=share, at_most=share * at_most / (minutes or 1)
                    )
                except runner.NoTimeError as error:
                    report.no_time(error, budget.enough(minutes, share, error.needed_s))
                    wrong = True
                    continue
                wrong |= bool(summary.unexpected or summary.lacking)
                if json:
                    _print_rows(summary)
            digest = inputs.digest(notebook.stem)
        failed |= wrong
        one = (str(notebook), own, "" if force or wrong else digest)  # the next call reports the failure too
        if notebook is found[0]:
            steps.begin(f"notebook {notebook.stem}")
            results += runs.run_notebooks([one[0]], own, paths.REPORTS, report.notebook_event, one[2])
            if published and results[0].status == "ok":
                _publish()
        else:
            left.append(one)
    for name, result in runs.side_by_side(left, paths.REPORTS, machine.at_once(1, NOTEBOOK_BYTES)):
        steps.begin(f"notebook {Path(name).stem}")
        results.append(result)
    changed = any(result.status == "ok" for result in results) or not (paths.REPORTS / "index.html").exists()
    if published and changed and any(result.output for result in results):
        _publish()
    return 1 if report.summary(results) or failed else 0


def _as_recorded(notebook: str, scale: str) -> dict[str, str]:
    """Parameters of a published page on speed, which shows full-size files: embedded models of 5 MB fit in a cache."""
    of_cache = scale == "mini" and notebook in studies.OF_FULL_SIZE
    return {"source": "recorded", "scale": studies.RANDOM_WEIGHTS} if of_cache else {}


def _run_on(hosts: Path, notebooks: list[str], scale: str, minutes: float, divide: bool) -> int:
    """Measure notebooks' studies on other machines; returns the exit code."""
    from plamo_study.publish import runs
    from plamo_study.studies import fleet

    plan.check_scale(scale)
    names = [path.stem for path in runs.find_notebooks(notebooks)]
    shares = budget.of_notebooks(names, scale, minutes)
    asked = [fleet.Asked(*each) for name in names for each in budget.of_notebook(name, scale, shares[name])]
    found = fleet.read(hosts)
    rows: Counter[str] = Counter()
    outcomes: list[fleet.Outcome] = []
    total = len(asked) * (1 if divide else len(found.host))

    def tell(host: str, new: int) -> None:
        rows[host] += new
        report.step(len(outcomes), total, f"{rows[host]} new rows of {host}")

    for outcome in fleet.measure(found, asked, divide, tell):
        outcomes.append(outcome)
        report.of_host(outcome)
    return int(any(outcome.wrong for outcome in outcomes))


def _print_rows(summary: runner.Summary) -> None:
    for row in summary.rows:
        echo(row)


if __name__ == "__main__":
    main()
