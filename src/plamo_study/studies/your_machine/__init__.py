"""your-machine: which file, how many at once, and can I trust it?"""

from plamo_study.studies import Chapter, Study

CHAPTER = Chapter(
    "your-machine",
    "which file, how many at once, and can I trust it",
    {"your-machine": Study("plan.your_machine")},
    first="plan.first_round",
)
