"""On a host of a fleet: measure the study that stdin names, and send its rows home on stdout, pack by pack.

It ends when stdin closes, which also happens when the connection home is lost.
"""

import os
import struct
import sys
import threading
from functools import cache
from typing import BinaryIO

import msgspec

from llama_meter import journal, packs
from llama_meter.errors import StudyError
from llama_meter.measure import runner
from llama_meter.measure.identity import renewed
from llama_meter.measure.worker import end_with_parent
from llama_meter.rows import SCHEMA, Fact, Record
from plamo_study.live import conduct, live
from plamo_study.plans import registry

SIZE = struct.Struct(">I")  # length in bytes, before each pack
READY = f"plamo-study {SCHEMA}"  # reply of a host that has this project


class Asked(msgspec.Struct, frozen=True):
    """A study to measure at a scale within some minutes (0: what its plan takes), on one host or ("") on any."""

    study: str
    scale: str
    minutes: float
    host: str = ""

    def __str__(self) -> str:
        return f"{self.study} at {self.scale}" + (f" on {self.host}" if self.host else "")


def main() -> None:
    """Run the request on stdin; exit code 1 and a message on stderr for errors that a user can fix."""
    home = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps the engine's output out of the rows
    asked = msgspec.json.decode(sys.stdin.buffer.readline(), type=Asked)
    threading.Thread(target=end_with_parent, args=(0,), daemon=True).start()
    try:
        measure(asked, home)
    except StudyError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # does not wait for the thread that still reads


def measure(asked: Asked, home: BinaryIO) -> None:
    """Measure and send every row home, then the whole journal, which has the rows of earlier calls."""
    path = journal.journal_path(asked.study, asked.scale, journal.LOCAL)

    def send(machine: str, records: list[Record]) -> None:
        made = packs.packed(machine, {path.stem: records}, registry.STUDIES)
        if made.rows:
            home.write(SIZE.pack(len(made.data)) + made.data)
            home.flush()

    @cache  # all are written before the first row
    def facts() -> list[Record]:
        return [record for record in journal.read(path) if isinstance(record, Fact)]

    class Home(live.Listener):
        def progress(self, event: runner.Progress) -> None:
            if row := event.row:
                send(row.machine, [*facts(), row])

    planned = conduct.build(asked.study, asked.scale)
    summary = conduct.measure(planned, path, Home(), minutes=asked.minutes)
    if summary.rows:
        send(summary.rows[-1].machine, renewed(journal.read(path)))
    if summary.lacking:
        raise StudyError(asked.study, conduct.lacking(summary), conduct.MORE)


if __name__ == "__main__":
    main()
