"""A-methods: how is a number made?"""

from plamo_study.studies import Chapter, Study

CHAPTER = Chapter(
    "A-methods",
    "how is a number made",
    {
        "A-gates": Study("llama_meter.measure.plan.gates", aside=True),
    },
    of_full_size=True,
    of_all=True,
)
