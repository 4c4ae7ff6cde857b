"""The `plamo-study` command: thin, and the only place that prints."""

import sys

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Run the command line; a StudyError becomes one message and exit code 2."""
    app()


if __name__ == "__main__":
    sys.exit(main())
