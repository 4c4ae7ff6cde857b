"""Our client beside AIPerf: one server, the same prompts, alternating runs, and what each client reports.

Users install AIPerf (PyPI: aiperf) themselves; nothing here downloads it. It uses the server's own token counts.
llama-server's own timings come from /metrics, read before and after each run of either client.
"""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from llama_meter import children, progress
from llama_meter.errors import StudyError
from llama_meter.measure import machine, result_file
from llama_meter.measure.plan import MODELS, check_scale
from llama_meter.serve import client, load, objectives, questions, server, traffic
from llama_meter.serve.client import Prompt, Target
from llama_meter.serve.load import Loaded
from llama_meter.workloads.serving import request_of, stock
from plamo_study.read import metrics
from plamo_study.read.results import AIPERF, BESIDE, INSTALL, OURS, Beside, Run

LOADS = {"mini": {1: 24, 4: 48}, "shape": {1: 2, 4: 4}, "weights": {1: 2, 4: 4}}  # concurrent requests: total requests
ROUNDS = 6
LIMIT_S = 600.0  # of one run of AIPerf
MS = 1e3
WORDS: dict[str, Any] = {  # a word-counting tokenizer: AIPerf always loads one, by default from the network
    "tokenizer.json": {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"},
    },
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?"},
}
SETTINGS = (
    "--endpoint-type completions --streaming --use-legacy-max-tokens --use-server-token-count "
    "--custom-dataset-type single_turn --dataset-sampling-strategy sequential --workers-max 1 --record-processors 1 "
    "--connection-reuse-strategy never "  # AIPerf fails a request whose reused connection the server has closed
    "--ui none --no-gpu-telemetry --no-server-metrics --export-level records"
)


def compare(path: Path, scale: str, aiperf: Path, rounds: int = ROUNDS) -> Beside:
    """Both clients on a new llama-server with the attention model, in alternating order. StudyError where one fails."""
    check_scale(scale)
    n_prompt, n_gen = objectives.SHORT[scale]
    said = version(aiperf)
    loads = LOADS[scale]
    prompts = questions.prompts(path, max(loads.values()), n_prompt, n_gen)
    runs: list[Run] = []
    with server.started(stock(path, scale)) as running:
        target = Target(running.url, usual=questions.OURS["llama-server"])
        warm(target, prompts[0])
        for number in progress.counted(range(rounds), "our client and AIPerf in turn"):
            for n_clients, n in loads.items():
                both: list[Callable[..., Run]] = [ours, partial(_theirs, aiperf)]
                both = both[:: -1 if number % 2 else 1]
                runs += [counted(one, target, prompts[:n], n_clients, number) for one in both]
    return Beside(
        machine=machine.facts(),
        model=MODELS[1],
        scale=scale,
        n_prompt=n_prompt,
        n_gen=n_gen,
        version=said,
        runs=runs,
    )


def write(found: Beside, place: str) -> Path:
    """Keep the runs; a new comparison at this scale replaces the one before it."""
    return result_file.keep(found, place, BESIDE.format(found.scale))


def warm(target: Target, prompt: Prompt) -> None:
    """Send one request, so that the server's one-time work is done before the measurement."""
    client.over(target, lambda web: client.ask(web, target, prompt))


def counted(one: Callable[..., Run], target: Target, prompts: Sequence[Prompt], n_clients: int, number: int) -> Run:
    """One run of either client, with the server's own counts for it."""
    before, run, after = _look(target), one(target, prompts, n_clients, number), _look(target)
    return msgspec.structs.replace(run, **own(before, after, len(prompts)))


def _look(target: Target) -> dict[str, float]:
    return client.over(target, lambda web: traffic.look(web, target))


def own(before: Mapping[str, float], after: Mapping[str, float], n_requests: int) -> dict[str, Any]:
    """llama-server's counts between two readings, as fields of a Run. It times an answer from its first token on."""
    names = {**traffic.SECONDS["llama-server"], "tokens": traffic.TOKENS["llama-server"][1]}
    grown = {what: after[name] - before[name] for what, name in names.items()}
    further = grown["tokens"] - n_requests
    told = {"prompt": grown["prefill"] / n_requests, "token": grown["decode"] / further if further > 0 else None}
    return told | {"counted": round(grown["tokens"])}


def asked(target: Target, prompts: Sequence[Prompt], n_clients: int) -> Loaded:
    """Send the prompts, `n_clients` at a time. StudyError if a request fails."""
    found = client.over(target, lambda web: load.closed(web, target, prompts, n_clients))
    if failed := [answer.failure for answer in found.answers if answer.failure]:
        raise StudyError(target.url, f"a request failed ({failed[0]})", "look at the server's log")
    return found


def ours(target: Target, prompts: Sequence[Prompt], n_clients: int, number: int) -> Run:
    """Run the prompts with our client, `n_clients` at a time. StudyError if a request fails."""
    found = asked(target, prompts, n_clients)
    requests = [request_of(answer, found.began_ns) for answer in found.answers]
    arrived, tokens = metrics.stamps(requests)
    return Run(
        tool=OURS,
        n_clients=n_clients,
        round=number,
        ttft=[(request.token_ns[0] - request.sent_ns) / metrics.NS for request in requests],
        itl=(metrics.mean_gaps(tokens) / metrics.NS).tolist(),
        whole=[(request.token_ns[-1] - request.sent_ns) / metrics.NS for request in requests],
        n_gen=[answer.n_gen for answer in found.answers],
        throughput=metrics.throughput(arrived, tokens, metrics.NS),
    )


def _theirs(aiperf: Path, target: Target, prompts: Sequence[Prompt], n_clients: int, number: int) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder) / "prompts.jsonl", Path(folder) / "out"
        for name, content in WORDS.items():
            (Path(folder) / name).write_text(json.dumps(content), encoding="utf-8")
        asked.write_text("".join(json.dumps({"text": prompt.text}) + "\n" for prompt in prompts), encoding="utf-8")
        extra = {"max_tokens": prompts[0].n_gen, "temperature": 0, **target.usual}
        told = ["-m", "any", "--tokenizer", folder, "--url", target.url, "--input-file", str(asked)]
        told += ["--output-artifact-dir", str(out)]
        told += ["--request-count", str(len(prompts)), "--concurrency", str(n_clients)]
        _said(aiperf, "profile", *SETTINGS.split(), *told, "--extra-inputs", json.dumps(extra), folder=folder)
        return told_by(out, len(prompts), n_clients, number)


def told_by(folder: Path, n_requests: int, n_clients: int, number: int) -> Run:
    """Run read from the files that AIPerf wrote to a folder. StudyError if they are incomplete."""
    try:
        lines = (folder / "profile_export.jsonl").read_text(encoding="utf-8").splitlines()
        every = [json.loads(line) for line in lines]
        failed = sum(bool(record.get("error")) for record in every)
        if failed or len(every) != n_requests:
            raise ValueError(f"{len(every) - failed} of {n_requests} requests were answered")
        records = [record["metrics"] for record in every]
        summary = json.loads((folder / "profile_export_aiperf.json").read_text(encoding="utf-8"))
        return Run(
            tool=AIPERF,
            n_clients=n_clients,
            round=number,
            ttft=[_seconds(record["time_to_first_token"]) for record in records],
            itl=[_seconds(record["inter_token_latency"]) for record in records],
            whole=[_seconds(record["request_latency"]) for record in records],
            n_gen=[int(record["output_sequence_length"]["value"]) for record in records],
            throughput=float(summary["output_token_throughput"]["avg"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise StudyError("AIPerf", f"wrote no records that can be read ({why})", INSTALL) from None


def _seconds(metric: dict[str, Any]) -> float:
    return float(metric["value"]) / {"ms": MS, "s": 1.0, "us": 1e6, "ns": 1e9}[metric["unit"]]


def version(aiperf: Path) -> str:
    """Version that AIPerf reports, with its name. StudyError if there is no such program."""
    words = _said(aiperf, "--version").split()
    if not words:
        raise StudyError(str(aiperf), "does not report its version", INSTALL)
    return f"AIPerf {words[-1]}"


def _said(aiperf: Path, *arguments: str, folder: str | None = None) -> str:
    command = [str(aiperf.absolute()), *arguments]
    pipe = subprocess.PIPE
    pipes: dict[str, Any] = {"stdout": pipe, "stderr": pipe, "text": True, "start_new_session": True}
    try:
        with children.guard() as guarded, subprocess.Popen(command, cwd=folder, **pipes) as child:
            guarded(-child.pid)
            try:
                out, err = child.communicate(timeout=LIMIT_S)
            except BaseException:
                os.killpg(child.pid, signal.SIGKILL)  # its workers too
                raise
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StudyError(str(aiperf), f"cannot be run ({error})", INSTALL) from error
    if child.returncode:
        raise StudyError(str(aiperf), f"failed ({(err or out).strip().splitlines()[-1:]})", INSTALL)
    return out
