"""The process that the cells of this study run in: the one that receives, and starts the one that sends."""

from plamo_study.measure import worker
from plamo_study.studies.disaggregation import service, shipment

if __name__ == "__main__":
    worker.main({"shipment": shipment.run, "service": service.run})
