"""The process that the cells of this study run in."""

from plamo_study.measure import worker
from plamo_study.studies.numeric_range import workload

if __name__ == "__main__":
    worker.main({"ranges": workload.run})
