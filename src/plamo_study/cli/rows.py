"""The commands on rows: one file of a machine's journals, packed where they were measured and added elsewhere."""

from pathlib import Path
from typing import Annotated

import typer

from llama_meter import journal, packs, paths
from llama_meter.disk import check_file, check_out, growing
from plamo_study.cli import report
from plamo_study.cli.options import Json, Replace
from plamo_study.cli.terminal import Grid, Terminal, echo
from plamo_study.plans import registry
from plamo_study.read import processors

app = typer.Typer(
    no_args_is_help=True, help="Rows of machines: pack yours into one file, add another machine's, remove them again."
)


@app.command()
def pack(
    out: Annotated[Path | None, typer.Argument(help="output file; none: MACHINE.rows.gz in this folder")] = None,
    machine: Annotated[str, typer.Option(help="id from `rows list`; none: the machine measured last")] = "",
    place: Annotated[str, typer.Option(help="local: measured here; reference: the tracked rows")] = journal.LOCAL,
    force: Replace = False,
) -> None:
    """Write a machine's rows and their facts to one file, without host, user or folder names, and NAME.md beside it:
    a text for a pull request, with the machine, its engine, what was verified and the main figures.

    Rows that name a folder, such as those of `plamo-study models quality` on a file of yours, are left out and counted.
    """
    from plamo_study.laws import strangers  # loads pandas, SciPy and Altair: 1.1 s of 1.7

    for path in (out, _beside(out)) if out else ():
        check_out(path, force)
    made = packs.pack(place, registry.STUDIES, machine)
    out = out or Path(f"{made.machine}{packs.SUFFIX}")
    about = _beside(out)
    for path in (out, about):
        check_out(path, force)
    unpacked = packs.unpack(made.data, registry.STUDIES)
    strangers.check(unpacked)
    command = "plamo-study rows pack" + (f" --machine {machine}" if machine else "")
    introduced = strangers.text(unpacked, out.name, command + (f" --place {place}" if place != journal.LOCAL else ""))
    for path, data in ((out, made.data), (about, introduced.encode())):
        with growing(path) as partial:
            partial.write_bytes(data)
    for why, rows in made.left_out.items():
        report.console.print(f"left out: {rows} rows of {why}", style="yellow")
    said = f"{unpacked.rows} rows of {len(unpacked.journals)} journals, {processors.machine(unpacked.facts)}"
    report.console.print(f"{report.short(out)}: {said}; add it elsewhere with `plamo-study rows add {out.name}`")
    report.console.print(f"{report.short(about)}: the text for a pull request; fill in its open line")


@app.command()
def add(
    file: Annotated[Path, typer.Argument(help="a file made by `rows pack`")],
    tracked: Annotated[bool, typer.Option(help="into data/measured/others, which the repository keeps")] = False,
) -> None:
    """Check every line of a pack, then file its rows under the machine's id. Existing rows stay.

    Refused are rows without a verdict, passes faster than the machine's own ceilings, and rows that the engine named by
    their facts cannot have made there.
    """
    from plamo_study.laws import strangers  # loads pandas, SciPy and Altair: 1.1 s of 1.7

    check_file(file, packs.MOST_BYTES)
    place = journal.OTHERS if tracked else ""
    unpacked = packs.unpack(file, registry.STUDIES)
    strangers.check(unpacked)
    new = packs.file(unpacked, place)
    said = f"{new} of {unpacked.rows} rows are new, {processors.machine(unpacked.facts)}"
    report.console.print(f"{said}: {report.short(paths.MEASURED / (place or unpacked.machine))}")


def _beside(out: Path) -> Path:
    """The text that goes with a pack."""
    return out.parent / (out.name.removesuffix(packs.SUFFIX) + ".md")


@app.command()
def remove(machine: Annotated[str, typer.Argument(help="id from `rows list`")]) -> None:
    """Remove a machine's rows that were added. Rows measured here and the reference's rows stay."""
    for path, rows in packs.remove(machine).items():
        report.console.print(f"{report.short(path)}: {rows} rows removed")


@app.command("list")
def list_machines(json: Json = False) -> None:
    """List every machine with rows here."""
    entries, names = [], []
    for place, machine, facts, rows in packs.machines():
        entry = {"place": place, "machine": machine, "chip": facts["chip"], "cores": facts["cores"]}
        names.append(processors.processor(facts))
        entry |= {"studies": len({row.study for row in rows}), "rows": len(rows)}
        entries.append(entry | {"not_right": sum(row.status != "ok" or row.valid is False for row in rows)})
    if json:
        echo(entries)
        return
    shown = Grid(
        "place", "machine", "chip", "cores", "studies", "rows", "of them not right", leave=("studies", "cores")
    )
    for entry, name in zip(entries, names, strict=True):
        shown.add(*map(str, (entry | {"chip": name}).values()))
    Terminal().print(shown)
