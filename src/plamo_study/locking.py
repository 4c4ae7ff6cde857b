"""One process at a time: a lock on an open file that the system releases when its holder ends, however it ends.

Network shares, FUSE and some containers' disks know no locks. There a file in the system's temporary folder is locked
instead: this keeps apart the processes of one machine, not those of two that share a disk.
"""

import errno
import fcntl
import os
import tempfile
from pathlib import Path

from plamo_study.errors import StudyError

WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


def lock(file: int) -> int:
    """Lock an open file or folder; returns the descriptor that holds the lock, to be closed with `file`: often itself.

    Raises BlockingIOError where another process holds it, and StudyError where nothing can be locked here.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        return _elsewhere(file)
    return file


def _elsewhere(file: int) -> int:
    """Lock a file of our own in the temporary folder that stands for `file`, by its number on its disk."""
    meant = os.fstat(file)
    place = Path(tempfile.gettempdir()) / f"plamo-study-{os.getuid()}-{meant.st_dev:x}-{meant.st_ino:x}.lock"
    try:
        held = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StudyError(str(place), f"cannot be written ({error.strerror})", MEND) from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise
    except OSError as error:
        os.close(held)
        raise StudyError(
            str(place), f"cannot be locked, nor can the project's disk ({error.strerror})", MEND
        ) from error
    return held


MEND = "set TMPDIR to a folder on a local disk, or move the project to one"
