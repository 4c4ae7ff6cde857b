"""The README's findings are sentences written by hand: each holds only while the recorded rows say so."""

from dataclasses import replace

import pytest

from plamo_study.errors import StudyError
from plamo_study.publish import headlines


def planted(monkeypatch, study, slower):
    """The recorded rows of a study, the times of some of them three times as long."""
    usual = headlines.recorded

    def recorded(name, scale="shape"):
        found = usual(name, scale)
        if name != study:
            return found
        rows, own = found.rows, slower(found.rows)
        longer = rows["samples_ns"].where(~own, rows["samples_ns"].map(lambda s: [[3 * t for t in p] for p in s]))
        return replace(found, rows=rows.assign(samples_ns=longer))

    monkeypatch.setattr(headlines, "recorded", recorded)


@pytest.mark.parametrize(
    ("said", "study", "slower"),
    [
        (headlines.cliff, "03-batch-scaling", lambda rows: (rows["workload"] == "decode") & (rows["n_seq"] == 4)),
        (headlines.bits, "04-controlled", lambda rows: rows["dtype"] == "Q4_0"),
    ],
)
def test_a_headline_that_the_rows_no_longer_say_is_refused(monkeypatch, said, study, slower):
    assert said()
    planted(monkeypatch, study, slower)
    with pytest.raises(StudyError, match="not what the recorded rows say"):
        said()
