"""10-builds: which build?"""

from plamo_study.studies import HISTORY, Chapter, Study

CHAPTER = Chapter(
    "10-builds",
    "which build",
    {
        "10-builds": Study("plan.builds", at_mini=True),
        "10-changes": Study(HISTORY, aside=True),
    },
)
