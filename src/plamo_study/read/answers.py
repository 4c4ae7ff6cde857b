"""What became of the answers of every load: one line a request, beside the answer that its prompt gets alone."""

from typing import Any

import pandas as pd

from llama_meter.measure.parting import Parting
from llama_meter.rows import Request
from llama_meter.serve.objectives import DISTINCT

ASKED = ("serving", "answers")  # workloads whose requests are held against the answers alone
OF_ROW = ["model", "dtype", "build", "server", "n_prompt", "n_gen", "n_seq", "n_clients", "key"]
VERDICTS = {"same": "as alone", "near-tie": "near-tie", "other": "changed"}
OF_REQUEST = ["answer", "parts", "gap", "begun", "failure", "reached"]


def by_request(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a request of every load, as `measurements.answers` describes it."""
    loads = rows[rows["workload"].isin(ASKED) & (rows["status"] == "ok") & ~rows["anchor"]]
    loads = loads.assign(server=loads["server"].where(loads["workload"] == "serving", ""))  # or none: the engine itself
    lines = [
        {name: getattr(row, name) for name in OF_ROW}
        | _answer(request, int(token), gap)
        | {"prompt": n % DISTINCT if row.server else request.id}
        for row in loads.itertuples()
        for n, (request, token, gap) in enumerate(
            zip(row.requests, row.series["differs"], row.series["gap"], strict=True)
        )
    ]
    requests = pd.DataFrame(lines, columns=[*OF_ROW, "prompt", *OF_REQUEST]).astype({"begun": bool, "reached": bool})
    return requests.assign(file=requests["model"] + " " + requests["dtype"])


def _answer(request: Request, token: int, gap: float) -> dict[str, Any]:
    """What became of a request: `token` and `gap` as in a row's series."""
    answer = VERDICTS[Parting(token, gap).verdict]
    if request.failure and token < 0:
        answer = "lost"
    return {
        "answer": answer,
        "parts": token,
        "gap": gap,
        "begun": bool(request.token_ns),
        "failure": request.failure,
        "reached": not request.failure.startswith("ConnectError"),
    }
