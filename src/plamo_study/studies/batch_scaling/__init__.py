"""03-batch-scaling: how many at once?"""

from plamo_study.studies import Chapter, Study

CHAPTER = Chapter(
    "03-batch-scaling",
    "how many at once",
    {
        "03-batch-scaling": Study("plan.batch_scaling"),
        "03-replicas": Study("plan.replicas"),
    },
    of_full_size=True,
)
