"""The process that the cells of this study run in."""

from plamo_study.measure import worker
from plamo_study.studies.context import naive, workload

if __name__ == "__main__":
    worker.main({"depth": workload.run, "naive": naive.run})
