"""01-phase-asymmetry: why is reading faster than writing?"""

from plamo_study.studies import Chapter, Study

CHAPTER = Chapter(
    "01-phase-asymmetry",
    "why is reading faster than writing",
    {
        "01-phase-asymmetry": Study("plan.phase_asymmetry"),
    },
    of_full_size=True,
)
