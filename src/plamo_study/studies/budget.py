"""How the time for measuring is shared among the studies of a command or a notebook."""

from plamo_study.measure import journal, recording
from plamo_study.studies import registry

SLOWER = 2.0  # times as long as on the reference machine a study may take here


def of_notebooks(names: list[str], minutes: float) -> dict[str, float]:
    """Minutes of each notebook, by the weights of its studies."""
    weights = {name: sum(study.weight for study in _own(name)) for name in names}
    every = sum(weights.values())
    return {name: minutes * weight / every if every else 0.0 for name, weight in weights.items()}


def of_study(name: str, scale: str, minutes: float) -> float:
    """Minutes of a study out of those of its notebook; 0: shown as recorded.

    That is what happens to a study that means nothing in part, was recorded, and would take longer than its share.
    Studies that time nothing come out the same on every machine but for rounding.
    """
    studies = dict(registry.of_notebook(name, scale))
    while True:
        every = sum(registry.STUDIES[own].weight for own in studies)
        shares = {own: minutes * registry.STUDIES[own].weight / every for own in studies}
        too_long = [own for own, at in studies.items() if _lasts(own, at) * SLOWER > shares[own]]
        if not too_long:
            return shares.get(name, 0.0)
        for own in too_long:
            del studies[own]


def _own(notebook: str) -> list[registry.Study]:
    return [registry.STUDIES[name] for name, _ in registry.of_notebook(notebook, "mini")]


def _lasts(name: str, scale: str) -> float:
    """Minutes that a study which is measured as a whole or not at all took when it was recorded; else 0."""
    path = recording.journal_path(name, scale, recording.REFERENCE)
    if not registry.STUDIES[name].whole or not path.exists():
        return 0.0
    rows = recording.of_one_machine(journal.latest_rows(journal.read(path)))
    return sum(row.elapsed_ns for row in rows) / 60e9
