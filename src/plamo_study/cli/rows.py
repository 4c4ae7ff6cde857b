"""The commands on rows: one file of a machine's journals, made where they were measured and added elsewhere."""

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from plamo_study import paths
from plamo_study.cli import report
from plamo_study.cli.options import Json
from plamo_study.errors import StudyError
from plamo_study.measure import packing, recording
from plamo_study.studies import registry

app = typer.Typer(no_args_is_help=True, help="Rows of machines: pack yours into one file, add somebody else's.")


@app.command()
def pack(
    out: Annotated[Path | None, typer.Argument(help="where to write it; none: MACHINE.rows.gz here")] = None,
    machine: Annotated[str, typer.Option(help="as `rows list` names it; none: the one measured last")] = "",
    place: Annotated[str, typer.Option(help="local: measured here; reference: the tracked rows")] = recording.LOCAL,
) -> None:
    """Write one file of a machine's rows and their facts. No host, user or folder is in it."""
    machine, packed = packing.pack(place, machine)
    out = out or Path(f"{machine}{packing.SUFFIX}")
    try:
        out.write_bytes(packed)
    except OSError as error:
        raise StudyError(str(out), f"cannot be written ({error.strerror})", "name another file") from error
    found = packing.unpack(out, registry.STUDIES)
    said = f"{found.rows} rows of {len(found.journals)} journals, {escape(found.facts['chip'])}"
    report.console.print(f"{report.short(out)}: {said}; add it elsewhere with `plamo-study rows add {out.name}`")


@app.command()
def add(
    file: Annotated[Path, typer.Argument(help="made by `rows pack`")],
    tracked: Annotated[bool, typer.Option(help="into data/measured/others, which the repository keeps")] = False,
) -> None:
    """Check every line of a pack, then file its rows under the machine's id. Rows that are here already stay."""
    place = recording.OTHERS if tracked else ""
    found, new = packing.add(file, registry.STUDIES, place)
    said = f"{new} of {found.rows} rows are new, {escape(found.facts['chip'])}"
    report.console.print(f"{said}: {report.short(paths.MEASURED / (place or found.machine))}")


@app.command("list")
def list_machines(json: Json = False) -> None:
    """Every machine that has rows here."""
    entries = []
    for place, machine, facts, rows in packing.machines():
        entry = {"place": place, "machine": machine, "chip": facts["chip"], "cores": facts["cores"]}
        entry |= {"studies": len({row.study for row in rows}), "rows": len(rows)}
        entries.append(entry | {"not_right": sum(row.status != "ok" or row.valid is False for row in rows)})
    if json:
        typer.echo(jsonlib.dumps(entries))
        return
    shown = Table("place", "machine", "chip", "cores", "studies", "rows", "of them not right")
    for entry in entries:
        shown.add_row(*(escape(str(value)) for value in entry.values()))
    Console().print(shown)
