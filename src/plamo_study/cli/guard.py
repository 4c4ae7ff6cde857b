"""What every command of this project runs in: progress on the console, and clear messages instead of tracebacks."""

import os
import signal
from collections.abc import Callable

from plamo_study import children, paths, progress
from plamo_study.cli import report, terminal
from plamo_study.errors import StudyError, of_memory, of_name, of_system


def guarded(command: Callable[[], object]) -> None:
    """Run a command line; what a user can mend becomes one message and exit code 2."""
    terminal.prepare()
    progress.listen(report.step)
    children.keep_python_safe()
    try:
        _check_folder()
        command()
    except (StudyError, OSError, MemoryError, RuntimeError, UnicodeEncodeError) as error:
        system = of_system(error) if isinstance(error, OSError) else None
        name = of_name(error) if isinstance(error, UnicodeEncodeError) else None
        known = error if isinstance(error, StudyError) else of_memory(error) or system or name
        if known is None:
            raise
        report.console.print(str(known), style="red", soft_wrap=True)
        raise SystemExit(2) from None


def _check_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise StudyError("the working directory", "has been deleted", f"cd {paths.ROOT}, or another folder") from None


def interruptible() -> None:
    """Let SIGINT and SIGTERM end the command as Ctrl-C does: else a server would outlive the command that started it.

    SIGINT too, because a shell's background job inherits it ignored.
    """
    for asked in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asked, signal.default_int_handler)
