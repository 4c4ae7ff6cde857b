"""05-quantization: which type?"""

from plamo_study.studies import HISTORY, Chapter, Study

CHAPTER = Chapter(
    "05-quantization",
    "which type",
    {
        "05-quantization": Study("plan.speed"),
        "05-controlled": Study(HISTORY, aside=True),
        "05-lifelike": Study(HISTORY, aside=True),
        "05-quality": Study("plan.quality", at_mini=True, whole=True),
    },
    of_full_size=True,
)
