"""The process that runs the cells of this study."""

from plamo_study.measure import worker
from plamo_study.studies.speculative import workload

if __name__ == "__main__":
    worker.main({"speculate": workload.run})
