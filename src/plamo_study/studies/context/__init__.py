"""06-context: what does context cost?"""

from plamo_study.studies import HISTORY, Chapter, Study

CHAPTER = Chapter(
    "06-context",
    "what does context cost",
    {
        "06-context": Study("plan.context"),
        "06-memory": Study("plan.memory"),
        "06-naive": Study("plan.naive"),
        "06-drift": Study(HISTORY, at_mini=True, aside=True),
        "06-window": Study(HISTORY, at_mini=True, aside=True),
        "06-copies": Study(HISTORY, aside=True),
    },
    of_full_size=True,
)
