"""The process that the cells of this study run in; the server is a child of it."""

from plamo_study.measure import worker
from plamo_study.studies.serving import workload

if __name__ == "__main__":
    worker.main({"serving": workload.run})
