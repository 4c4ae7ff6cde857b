"""Measure a GGUF, judge it, probe a server, or read rows: `python -m llama_meter measure FILE`.

Nothing here needs pandas, a chart or Jupyter.
"""

# ruff: noqa: E402 # what would break the imports is refused before them
from llama_meter import surroundings

surroundings.prepare()

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from llama_meter import children, journal
from llama_meter.cells import Prefill, columns
from llama_meter.disk import check_out
from llama_meter.errors import MENDABLE, StudyError, mendable
from llama_meter.rows import Row

JOURNAL = "llama-meter.jsonl"
WRONG, REFUSED = 1, 2  # exit codes: a computation was wrong or failed; the input cannot be used


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and give its exit code; what a user can mend is one message on stderr."""
    asked = _parser().parse_args(arguments)
    children.keep_python_safe()
    try:
        code: int = asked.do(asked)
        sys.stdout.flush()
    except BrokenPipeError:  # as in `| head`: who reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return WRONG
    except MENDABLE as error:
        message = mendable(error)
        if message is None:
            raise
        print(message, file=sys.stderr)
        return REFUSED
    return code


def measure(asked: argparse.Namespace) -> int:
    """Measure both phases of files; rows go to a journal, and what is there already is not measured again."""
    from llama_meter.measure import runner
    from llama_meter.measure.asked import sweep
    from llama_meter.measure.of_files import plan

    names = ("n_prompt", "n_gen", "n_seq", "n_depth", "n_threads", "n_gpu_layers", "flash_attn", "type_k", "type_v")
    wanted = sweep(files=[str(file) for file in asked.files], **{name: getattr(asked, name) for name in names})
    planned = plan(wanted)

    def tell(event: runner.Progress) -> None:
        if event.row is None:
            cell, left = event.task.cell, f"{event.remaining_s:.0f} s left"
            print(f"{event.done + 1} of {event.total}: {cell.workload} of {cell.files[0][0]}; {left}", file=sys.stderr)

    summary = runner.sweep(planned, asked.journal, tell, minutes=asked.minutes)
    _print(summary.rows, asked.json)
    for row in summary.unexpected:
        print(f"{row.cell.workload}: {row.failure or 'computed, but wrong'}", file=sys.stderr)
    return WRONG if summary.unexpected else 0


def judge(asked: argparse.Namespace) -> int:
    """Check a file: its header and tensors, then the engine's logits against the oracle where one reads the file."""
    from llama_meter.measure import checking
    from llama_meter.models.finding import blocking
    from llama_meter.models.repair import repair

    file, sha256 = asked.file, asked.sha256
    if asked.repair:
        check_out(asked.repair, asked.force)
        for change in repair(file, asked.repair, sha256=sha256):
            print(change, file=sys.stderr)
        file, sha256 = asked.repair, ""
    findings = checking.check(file, sha256)
    for finding in findings:
        line = f"{finding.severity}: {finding.evidence}"
        line += f"\n  mend: {finding.mend}" if finding.severity != "note" else ""
        print(json.dumps(msgspec.to_builtins(finding)) if asked.json else line)
    if not (findings or asked.json):
        print(f"{file}: nothing found")
    return WRONG if blocking(findings) else 0


def probe(asked: argparse.Namespace) -> int:
    """Ask a server alone and under load: are its answers right, and which phase limits it."""
    from llama_meter.serve import page, probe as probing
    from llama_meter.serve.client import Target
    from llama_meter.serve.meeting import Ask

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    ask = Ask(Target(asked.url, asked.model), asked.prompt_tokens, asked.output_tokens, asked.concurrency)
    report = probing.probe(probing.prepared(ask, asked.yes, say), say)
    print(json.dumps(msgspec.to_builtins(report)) if asked.json else page.text(report))
    return 0


def read(asked: argparse.Namespace) -> int:
    """Print a journal's rows, each with its verdict."""
    if not asked.journal.exists():
        raise StudyError(str(asked.journal), "is not there", "python -m llama_meter measure FILE writes one")
    _print(journal.latest_rows(journal.read(asked.journal)), asked.json)
    return 0


def _print(rows: Iterable[Row], as_json: bool) -> None:
    from llama_meter.measure.of_files import rates

    for speed in rates(rows):
        cell = speed.cell
        values = {name: value for name, value in columns(cell).items() if value not in (None, "", ())}
        if as_json:
            rate = {"tokens_per_second": speed.rate.value, "low": speed.rate.low, "high": speed.rate.high}
            line = values | rate | {"processes": speed.n, "disturbed": speed.disturbed, "verdicts": speed.verdicts}
            print(json.dumps(msgspec.to_builtins(line)))
            continue
        what = f"reads {values['n_prompt']}" if isinstance(cell, Prefill) else f"writes after {values['n_prompt']}"
        many = f" x {values['n_seq']}" if values.get("n_seq", 1) > 1 else ""
        marks = f", {speed.disturbed} of {speed.n} disturbed" if speed.disturbed else ""
        name = f"{values['model']} {values['dtype']}"
        print(f"{name:<32} {what + many:<20} {speed.rate:.4g} tokens/s  {', '.join(speed.verdicts)}{marks}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m llama_meter", description=(__doc__ or "").split("\n", 1)[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    one = commands.add_parser("measure", help="measure both phases of GGUF files, each number with its verdict")
    one.add_argument("files", nargs="+", type=Path, metavar="FILE")
    one.add_argument(
        "-p", "--n-prompt", default="", metavar="N", help="tokens read: 128,512 or 128-1024*2; default: 512"
    )
    one.add_argument("-n", "--n-gen", default="", metavar="N", help="tokens written; default: 32")
    one.add_argument(
        "-d", "--n-depth", default="", metavar="N", help="tokens before the first one written; default: 128"
    )
    one.add_argument(
        "-s", "--n-seq", default="", metavar="N", help="sequences written together: 1,4,8 or 1-16; default: 1"
    )
    one.add_argument("-t", "--n-threads", default="", metavar="N")
    one.add_argument("-ngl", "--n-gpu-layers", default="", metavar="N", help="layers on the GPU; -1: all")
    one.add_argument("-fa", "--flash-attn", default="", metavar="on|off|auto")
    one.add_argument("-ctk", "--type-k", default="", metavar="TYPE")
    one.add_argument("-ctv", "--type-v", default="", metavar="TYPE")
    one.add_argument("--minutes", type=float, default=0, help="limit; 0: as long as it takes")
    one.add_argument("--journal", type=Path, default=Path(JOURNAL), help=f"where rows are kept; default: {JOURNAL}")
    one.set_defaults(do=measure)

    two = commands.add_parser("judge", help="say whether a GGUF is sound, and the engine computes it right")
    two.add_argument("file", type=Path, metavar="FILE")
    two.add_argument("--sha256", default="", help="expected SHA-256")
    two.add_argument(
        "--repair", type=Path, metavar="OUT", help="write it to OUT with corrected metadata, and judge OUT"
    )
    two.add_argument("--force", action="store_true", help="replace OUT")
    two.set_defaults(do=judge)

    three = commands.add_parser("probe", help="say whether a server answers right under load, and what limits it")
    three.add_argument("url")
    three.add_argument("--model", default="")
    three.add_argument("--prompt-tokens", type=int, default=256, metavar="N")
    three.add_argument("--output-tokens", type=int, default=32, metavar="N")
    three.add_argument("--concurrency", type=int, default=2, metavar="N")
    three.add_argument("--yes", action="store_true", help="allow requests to a server that is not on this machine")
    three.set_defaults(do=probe)

    four = commands.add_parser("read", help="print a journal's rows with their verdicts")
    four.add_argument("journal", type=Path, metavar="JOURNAL")
    four.set_defaults(do=read)
    for command in (one, two, three, four):
        command.add_argument("--json", action="store_true", help="JSON lines on stdout")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
