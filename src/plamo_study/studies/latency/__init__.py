"""07-latency: who waits?"""

from plamo_study.studies import Chapter, Study

CHAPTER = Chapter(
    "07-latency",
    "who waits",
    {
        "07-chunked": Study("plan.chunked"),
        "07-disaggregation": Study("plan.disaggregation"),
        "07-scheduling": Study("plan.scheduling"),
        "07-fleet": Study("plan.fleet", aside=True),
    },
    of_full_size=True,
)
