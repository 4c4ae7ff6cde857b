"""09-serving: what does a server add?"""

from plamo_study.studies import HISTORY, Chapter, Study

CHAPTER = Chapter(
    "09-serving",
    "what does a server add",
    {
        "09-serving": Study("plan.serving"),
        "09-knees": Study(HISTORY, aside=True),
    },
)
