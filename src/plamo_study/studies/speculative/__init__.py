"""08-speculative: do drafts pay?"""

from plamo_study.studies import HISTORY, Chapter, Study

CHAPTER = Chapter(
    "08-speculative",
    "do drafts pay",
    {
        "08-speculative": Study("plan.speculative"),
        "08-several": Study(HISTORY, aside=True),
        "08-columns": Study(HISTORY, aside=True),
        "08-drafters": Study("plan.drafters", at_mini=True),
    },
    of_full_size=True,
)
