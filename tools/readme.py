"""Write what README, USING, FINDINGS, data/ROWS.md and the upstream reports say of the recorded rows.

python tools/readme.py          # writes it
python tools/readme.py --check  # only says by its exit code whether all of it is up to date
"""

from typing import Annotated

import typer
from documents import parts

from plamo_study.cli.guard import guarded


def readme(check: Annotated[bool, typer.Option(help="only check whether it is up to date")] = False) -> None:
    """Write the documents' parts that come from recorded rows."""
    if not check:
        parts.write()
    elif not parts.is_current():
        raise typer.Exit(1)


if __name__ == "__main__":
    guarded(lambda: typer.run(readme))
