"""The process that the cells of this study run in."""

from plamo_study.measure import worker
from plamo_study.studies.scheduling import workload

if __name__ == "__main__":
    worker.main({"traffic": workload.run})
