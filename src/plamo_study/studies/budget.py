"""How the time for measuring is shared among the studies of a command or a notebook."""

from plamo_study.measure import journal, recording
from plamo_study.studies import registry

LEFT_OUT = -1.0
USUAL = 1.0  # minutes, where nothing is known
SLOWER = 2.0  # times as long as on the reference machine a study may take here


def of_notebooks(names: list[str], minutes: float) -> dict[str, float]:
    """Minutes of each notebook, by the weights of its studies."""
    weights = {name: sum(study.weight for study in _own(name)) for name in names}
    every = sum(weights.values())
    return {name: round(minutes * weight / every, 3) if every else 0.0 for name, weight in weights.items()}


def of_notebook(notebook: str, scale: str, minutes: float) -> list[tuple[str, str, float]]:
    """What to measure for a notebook: study, scale, and minutes (0: what its plan takes)."""
    studies = [(name, at, of_study(name, at, minutes)) for name, at in registry.of_notebook(notebook, scale)]
    return [each for each in studies if each[2] != LEFT_OUT]


def of_study(name: str, scale: str, minutes: float) -> float:
    """Minutes of a study out of those of its notebook; 0: what its plan takes; LEFT_OUT: it is shown as recorded.

    Left out is a study that means nothing in part, was recorded, and would take longer than its share. Such studies
    time nothing, so they come out the same on every machine but for rounding.
    """
    if not minutes:
        return 0.0
    studies = dict(registry.of_notebook(name, scale))
    while studies:
        every = sum(registry.STUDIES[own].weight for own in studies)
        shares = {own: minutes * registry.STUDIES[own].weight / every for own in studies}
        too_long = [own for own, at in studies.items() if _whole(own, at) * SLOWER > shares[own]]
        if not too_long:
            return shares.get(name, LEFT_OUT)
        for own in too_long:
            del studies[own]
    return LEFT_OUT


def lasts(name: str, scale: str, minutes: float) -> float:
    """Seconds that a study is expected to take: its share, or what it took when it was recorded."""
    return 60 * (minutes or _recorded(name, scale) or USUAL)


def _own(notebook: str) -> list[registry.Study]:
    return [registry.STUDIES[name] for name, _ in registry.of_notebook(notebook, "mini")]


def _whole(name: str, scale: str) -> float:
    """Minutes that a study takes which is measured as a whole or not at all; 0 for others."""
    return _recorded(name, scale) if registry.STUDIES[name].whole else 0.0


def _recorded(name: str, scale: str) -> float:
    """Minutes that a study took when it was recorded; 0 where it was not."""
    path = recording.journal_path(name, scale, recording.REFERENCE)
    if not path.exists():
        return 0.0
    rows = recording.of_one_machine(journal.latest_rows(journal.read(path)))
    return sum(row.elapsed_ns for row in rows) / 60e9
