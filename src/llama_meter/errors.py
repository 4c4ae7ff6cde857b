"""The one exception a user is meant to read."""

import errno
import os

MORE_MEMORY = "close other programs or raise the limit with `ulimit`, then give the same command"
LACKS_MEMORY = (  # in the words of Python, of Rust, of the C library, of the loader, of C++, of ggml and of Metal
    "MemoryError",
    "can't start new thread",
    f"os error {errno.ENOMEM}",
    "Cannot allocate memory",
    "failed to map segment",
    "bad_alloc",
    "mem_buffer != NULL",
    "failed to allocate",
    "Insufficient Memory",
)
MENDS = {  # remedies for what a system refuses, by errno; any other errno is a bug in this program
    errno.ENOENT: "look whether the path is right",
    errno.EACCES: "make it yours with chmod, or work on a copy of the folder that you may write to",
    errno.EPERM: "make it yours with chown, or work on a copy of the folder that you may write to; on a Mac, allow "
    "your terminal the folder in System Settings, Privacy & Security, Files and Folders",
    errno.EROFS: "work on a copy on a disk that can be written to",
    errno.EISDIR: "name a file",
    errno.ENOTDIR: "name a folder",
    errno.EEXIST: "name another, or remove it",
    errno.ENAMETOOLONG: "give it a shorter name",
    errno.ENOSPC: "free space there with `df -h`, then give the same command",
    errno.EDQUOT: "free space there with `quota`, then give the same command",
    errno.EFBIG: "raise the limit on files with `ulimit -f`, then give the same command",
    errno.ENOMEM: MORE_MEMORY,
    errno.EMFILE: "raise the limit on open files with `ulimit -n`",
}
FAILED_GATE = "FailedGate"  # name of the error in a notebook that measured a file whose gate failed, and goes on
NOT_MEASURED = "NotMeasured"  # of that in a notebook that had no time for a file of a user's own, and goes on


class StudyError(Exception):
    """Bad input or a failed step: what is wrong, why, and the command that mends it.

    The command line prints it without a traceback and exits with 2.
    """

    def __init__(self, what: str, why: str, mend: str):
        super().__init__(f"{what}: {why}\n  mend: {mend}")
        self.what, self.why, self.mend = what, why, mend

    def __reduce__(self) -> tuple[type["StudyError"], tuple[str, str, str]]:
        """Support pickling: the error may cross from one process to another."""
        return StudyError, (self.what, self.why, self.mend)

    def _render_traceback_(self) -> list[str]:
        """Give IPython the message, which a notebook shows in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class NotJudgedError(StudyError):
    """A sound file that is for something else than writing text: nothing is measured with it, and nothing is wrong."""


class UnmeasuredError(StudyError):
    """Nothing of a study was measured, for lack of time or of a program: its recorded rows can be shown instead."""


MENDABLE = (StudyError, OSError, MemoryError, RuntimeError)  # what a command may end in that its user can mend


def offer_check(file: object) -> str:
    """The command that says what is wrong with a model file."""
    return f"plamo-study models check {file}"


def of_system(error: OSError) -> StudyError | None:
    """The error for a refusal by the system, with its files; None where the cause is a bug in this program."""
    if error.errno not in MENDS:
        return None
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    return StudyError(" to ".join(dict.fromkeys(names)) or "the system", os.strerror(error.errno), MENDS[error.errno])


def mendable(error: BaseException) -> StudyError | None:
    """The message that a command prints in place of a traceback; None for a bug in this program."""
    if isinstance(error, StudyError):
        return error
    if isinstance(error, MemoryError) or says_memory(str(error)):
        return StudyError("memory", f"there is not enough memory ({error})".replace(" ()", ""), MORE_MEMORY)
    return of_system(error) if isinstance(error, OSError) else None


def says_memory(text: str) -> bool:
    """Whether what a library or a process said before its end means that it lacked memory."""
    return any(words in text for words in LACKS_MEMORY)
