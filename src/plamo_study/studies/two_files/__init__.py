"""B-two-files: can one file read and another write?"""

from plamo_study.studies import HISTORY, Chapter, Study

CHAPTER = Chapter(
    "B-two-files",
    "can one file read and another write",
    {
        "B-pairs": Study("plan.pairs", at_mini=True),
        "B-requests": Study(HISTORY, aside=True),
    },
    of_pairs=True,
)
