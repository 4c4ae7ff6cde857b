"""Train an embedded model again on this Python's standard library; writes its file, record and card.

pip install -e '.[train]' && python tools/train.py plamo-2-1b
"""

from typing import Annotated

import typer
from training import needs

from plamo_study.cli import report_models
from plamo_study.cli.guard import guarded


def train(
    name: Annotated[str, typer.Argument(help="plamo-2-1b, plamo-3-nict-2b, plamo-2-draft or plamo-3-draft")],
    steps: Annotated[int, typer.Option(help="0: the recipe's")] = 0,
) -> None:
    """Train an embedded model again on this Python's standard library; writes its file, record and card."""
    needs.require()
    from training import run  # loads PyTorch, which is no usual package

    report_models.written(run.train(name, typer.echo, steps))
    for dtype, digest in run.pins(name).items():
        typer.echo(f'{dtype} = "{digest}"')


if __name__ == "__main__":
    guarded(lambda: typer.run(train))
