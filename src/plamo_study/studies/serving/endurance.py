"""What notebook 11 says of a server under load for long, of one that is stopped meanwhile, and of the patched one."""

from functools import partial

import msgspec
import pandas as pd
from IPython.display import Markdown

from plamo_study.measure.recording import Recording
from plamo_study.present import evidence
from plamo_study.present.evidence import chip, escaped
from plamo_study.present.tables import Columns, Table, significant, table
from plamo_study.studies.serving import analysis, crowd, soak
from plamo_study.studies.serving.plan import SLOTS

MS = 1e3
MIB = 2**20
SETTLED = 5  # minutes after which memory should no longer grow
SERVERS = {crowd.RELEASED: False, crowd.PATCHED: True}  # whether patched
HELD_UP = f"{soak.MADE_BY} --minutes 6 --hold 30"


def stuck(recording: Recording) -> list[str]:
    """Whether a server that kept up comes back from a stop, and one whose threads wait otherwise."""
    held, mended = _held(recording), _held(recording, patched=True)
    if not held or _gone(held) is not None:
        return []
    first, last = held.minutes[soak.HELD_AT - 1], held.minutes[-1]
    later, after = len(held.minutes) - soak.HELD_AT - held.held_s / 60, ""
    if mended and _same(mended, held):
        after = (
            f" On a server whose threads wait otherwise ([the patch](../data/upstream/server-wakeups.md)) it was "
            f"{mended.minutes[-1].answered:,} in that minute, and {mended.failed:,} of {mended.sent:,} failed."
        )
    return [
        f"**A server stopped for {held.held_s:.0f} s had not come back {later:g} minutes later.** "
        f"{escaped(held.model)} at {held.rate:.0f} requests a second: {first.answered:,} answers in the minute before "
        f"the stop, {last.answered:,} in the last minute; {held.failed:,} of {held.sent:,} requests failed.{after} "
        f"(One run each.)"
    ]


def minutes(recording: Recording) -> pd.DataFrame:
    """What the figure of the soak draws: its minutes; none where there was no soak."""
    return _minutes(_soaked(recording))


def _minutes(found: soak.Soak | None) -> pd.DataFrame:
    told = [{"minute": n + 1} | msgspec.to_builtins(each) for n, each in enumerate(found.minutes if found else ())]
    return pd.DataFrame(told, columns=["minute", *soak.Minute.__struct_fields__]).astype(float)  # None: NaN


def _soaked(recording: Recording) -> soak.Soak | None:
    return evidence.standing(recording, partial(soak.recorded, scale=recording.scale))


def accounts(recording: Recording) -> Markdown:
    """What became of every request of the soak, and of memory."""
    found = _soaked(recording)
    if not found:
        return Markdown(f"No server was loaded for long at this scale: `{soak.MADE_BY}`.")
    lines = [
        f"**{escaped(found.model)}, {len(found.minutes)} minutes at {found.rate:.1f} requests a second** "
        f"({chip(found.machine)}): {found.sent:,} requests were sent, {found.answered:,} answered, {found.failed:,} "
        f"failed. {found.differ - found.near_ties:,} answers are others than alone (and {found.near_ties:,} at "
        f"near-ties)."
    ]
    settled = found.minutes[SETTLED - 1 :] or found.minutes[-1:]
    for who in ("client", "server"):
        sizes = [getattr(minute, f"{who}_bytes") / MIB for minute in settled]
        lines.append(
            f"The {who}'s memory is {sizes[0]:.1f} MiB at first (after minute {min(SETTLED, len(found.minutes))}), "
            f"{sizes[-1]:.1f} at the end, and {max(sizes):.1f} at most in between."
        )
    late = [minute.late for minute in found.minutes if minute.late is not None]
    lines += (
        [f"One request of twenty was sent {max(late) * MS:.1f} ms late or more in the worst minute."] if late else []
    )
    return Markdown(" ".join([*lines, *_tokens(found), *_failures(found)]))


def _tokens(found: soak.Soak) -> list[str]:
    if found.counted is None:
        return []
    return [f"The answers that came have {found.tokens:,} tokens; the server counts {found.counted:,}."]


def _failures(found: soak.Soak) -> list[str]:
    said = [f"Failed: {escaped(why)}, {n:,} times." for why, n in found.failures.items()]
    return [*said, found.ended] if found.ended else said


def held(recording: Recording) -> pd.DataFrame:
    """What the figure of servers that were held up draws: the minutes of each `server`."""
    servers = {name: _minutes(_held(recording, patched)) for name, patched in SERVERS.items()}
    return pd.concat([minutes.assign(server=name) for name, minutes in servers.items()])


def _held(recording: Recording, patched: bool = False) -> soak.Soak | None:
    return evidence.standing(recording, partial(soak.recorded, scale=recording.scale, held=True, patched=patched))


def _same(one: soak.Soak, other: soak.Soak) -> bool:
    """Whether two soaks were the same load on one machine, stopped for as long."""
    told = [(each.machine, each.model, each.rate, each.held_s, len(each.minutes)) for each in (one, other)]
    return told[0] == told[1]


def _usual(found: soak.Soak) -> int:
    """Requests that were in the server at most at the end of a minute before it was stopped."""
    return max(minute.waiting for minute in found.minutes[: soak.HELD_AT])


def _gone(found: soak.Soak) -> int | None:
    """The minute after a stop by which the queue was gone and stayed so; None: it was not."""
    calm = [minute.waiting <= max(_usual(found), SLOTS) for minute in found.minutes[soak.HELD_AT :]]
    return next((n + 1 for n, _ in enumerate(calm) if all(calm[n:])), None)


def recovered(recording: Recording, patched: bool = False) -> Markdown:
    """Whether a server that was held up came back to what it was before, and how soon it should have."""
    found = _held(recording, patched)
    if not found:
        how = f"{HELD_UP} --patched`, after `plamo-study server build --patched" if patched else HELD_UP
        return Markdown(f"No such server was held up at this scale: `{how}`.")
    before, after, gone = found.minutes[: soak.HELD_AT], found.minutes[soak.HELD_AT :], _gone(found)
    usual, most = _usual(found), max(minute.waiting for minute in after)
    came = f"The queue was gone by minute {gone} of these" if gone else "The queue was still there at the end"
    lines = [
        f"**{escaped(found.model)} at {found.rate:.1f} requests a second, "
        f"{crowd.PATCHED if patched else crowd.RELEASED}, stopped for {found.held_s:.0f} s** after "
        f"minute {soak.HELD_AT} ({chip(found.machine)}). {_made_up(recording, found)}Before it at most {usual} "
        f"requests were in the server at a minute's end, and half of them had their first token within "
        f"{_within(before[-1])}. In the minutes from the stop on there were up to {most:,} at a minute's end. {came}: "
        f"{after[-1].waiting:,} requests, and {after[-1].answered:,} answers in the last minute, half with a first "
        f"token within {_within(after[-1])}. Of {found.sent:,} requests {found.failed:,} failed."
    ]
    return Markdown(" ".join([*lines, *_tokens(found), *_failures(found)]))


def crowds(recording: Recording) -> Table:
    """What a token takes, by the server's own count, with few and with many requests waiting, on both servers."""
    found = _crowds(recording)
    if not found:
        return Table(pd.DataFrame([{"not compared here": f"plamo-study server build --patched, {crowd.MADE_BY}"}]))
    time = significant(3, MS)
    columns: Columns = {
        "n_clients": ("requests at a time", ""), "waits": ("waiting", ""),
        "released": ("as released (ms)", time), "patched": ("patched (ms)", time),
        "ratio": ("released / patched", ".2f"), "rate": ("tokens/s, released", significant(3)),
        "rate_patched": ("patched", significant(3)), "rates": ("patched / released", ".2f"),
    }  # fmt: skip
    rounds = len({each.round for each in found.loads})
    note = (
        f"{escaped(found.model)}, {rounds} servers of each kind, in turn; a further token by the server's own count. "
        f"Recorded on {chip(found.machine)}."
    )
    beside = {"ratio": ("released", "patched"), "rates": ("rate_patched", "rate")}
    return table(analysis.crowds(found), columns, note, beside)


def _crowds(recording: Recording) -> crowd.Crowds | None:
    return evidence.standing(recording, crowd.recorded) if recording.scale == "mini" else None


def side_by_side(recording: Recording) -> Table:
    """The server as released and the patched one under the same load, stopped for as long."""
    entries = []
    for name, patched in SERVERS.items():
        found = _held(recording, patched)
        if not found or not _same(found, _held(recording) or found):
            continue
        before, after, gone = found.minutes[soak.HELD_AT - 1], found.minutes[soak.HELD_AT :], _gone(found)
        entries.append(
            {
                "llama-server": name,
                "requests/s": f"{found.rate:.1f}",
                "stopped for (s)": f"{found.held_s:.0f}",
                "answers in the minute before": f"{before.answered:,}",
                "in the minute of the stop": f"{after[0].answered:,}, {after[0].failed:,} failed",
                f"in minute {len(after)} from the stop on": f"{after[-1].answered:,}",
                "not ended, at most, at a minute's end": f"{max(minute.waiting for minute in after):,}",
                "queue gone by minute": str(gone or "never"),
                "failed, of sent": f"{found.failed:,} of {found.sent:,}",
            }
        )
    return Table(pd.DataFrame(entries or [{"not tried here": HELD_UP}]))


def _made_up(recording: Recording, found: soak.Soak) -> str:
    """How soon a queue should be gone, by what the rate leaves free of a server with all slots taken and no queue."""
    tried = _crowds(recording)
    if not tried or _what(tried) != _what(found):
        return ""
    full = analysis.crowds(tried).set_index("waits").loc[0]
    most = full["rate_patched" if found.patched else "rate"].value / found.n_gen
    queue = found.held_s * found.rate
    if most <= found.rate:
        return f"With all slots taken it answers {most:.1f} requests a second, so it has nothing to spare. "
    return (
        f"With all slots taken and nobody waiting it answers {most:.1f} requests a second, so the {queue:.0f} that "
        f"came meanwhile should be made up for in {queue / (most - found.rate):.0f} s. "
    )


def _what(found: soak.Soak | crowd.Crowds) -> tuple[object, ...]:
    return found.machine, found.model, found.n_prompt, found.n_gen


def _within(minute: soak.Minute) -> str:
    return "no time: none was answered" if minute.ttft is None else f"{minute.ttft * MS:,.0f} ms"
