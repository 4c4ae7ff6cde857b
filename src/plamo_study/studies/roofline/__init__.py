"""02-roofline: how near is the limit?"""

from plamo_study.studies import Chapter, Study

CHAPTER = Chapter(
    "02-roofline",
    "how near is the limit",
    {
        "02-roofline": Study("plan.roofline"),
        "02-trace": Study("plan.trace"),
    },
    of_full_size=True,
    of_all=True,
)
