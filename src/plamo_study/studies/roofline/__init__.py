"""02-roofline: how near is the limit?"""

from plamo_study.studies import HISTORY, Chapter, Study

CHAPTER = Chapter(
    "02-roofline",
    "how near is the limit",
    {
        "02-roofline": Study("plan.roofline"),
        "02-trace": Study(HISTORY, aside=True),
    },
    of_full_size=True,
    of_all=True,
)
