"""The one exception a user is meant to read."""


class StudyError(Exception):
    """Bad input or a failed step: what is wrong, why, and the command that mends it.

    The command line prints it without a traceback and exits with 2.
    """

    def __init__(self, what: str, why: str, mend: str):
        super().__init__(f"{what}: {why}\n  mend: {mend}")
        self.what, self.why, self.mend = what, why, mend

    def __reduce__(self) -> tuple[type["StudyError"], tuple[str, str, str]]:
        """It may cross from one process to another."""
        return StudyError, (self.what, self.why, self.mend)
