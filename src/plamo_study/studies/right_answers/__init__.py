"""04-right-answers: is my answer mine?"""

from plamo_study.studies import HISTORY, Chapter, Study

CHAPTER = Chapter(
    "04-right-answers",
    "is my answer mine",
    {
        "04-source-table": Study("plamo_study.studies.batch_scaling.plan.source_table", aside=True),
        "04-batching-law": Study("plan.batching_law", at_mini=True),
        "04-answers": Study("plan.answers", at_mini=True, aside=True),
        "04-hybrids": Study("plan.hybrids", at_mini=True),
        "04-elsewhere": Study(HISTORY, at_mini=True, aside=True),
    },
)
