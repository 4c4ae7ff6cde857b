"""What pairs of files lose: the sums of a text that one file read and another wrote, a line each."""

import pandas as pd

USUAL = "as usual"
VARIED = {
    "n_ctx": "{:,} tokens read",
    "n_gen": "{:,} tokens written",
    "dtype": "reference in {}",
    "text": "{}",
    "type_k": "keys and values in {}",
}
SUMS = ["kld", "near", "far"]
HANDED = ["model", "case", "exact", "read", "write", "text", "tokens", *SUMS]
STEP = 8  # written tokens that are one distance from the hand-over


def handed(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a text for each pair of files of which one read and one wrote: sums over its written tokens, in nats.

    `case`: what a row does otherwise than the first one, one thing at a time, else USUAL. Columns: HANDED.
    """
    lines = []
    for _, row in rows.iterrows():
        first = rows.iloc[0]
        case = ", ".join(how.format(row[what]) for what, how in VARIED.items() if row[what] != first[what]) or USUAL
        for pair in [key[4:] for key in row.series if key.startswith("kld/")]:
            read, write = pair.split(">")
            sums = {name: row.series.get(f"{name}/{pair}", float("nan")) for name in SUMS}
            of = {"model": row.model, "case": case, "exact": row["dtype"], "read": read, "write": write}
            tokens = row.series["tokens"]
            lines.append(pd.DataFrame({**of, "text": range(len(tokens)), "tokens": tokens, **sums}))
    table = pd.concat(lines, ignore_index=True) if lines else pd.DataFrame(columns=HANDED)
    return table.drop_duplicates(["model", "case", "read", "write", "text"])
