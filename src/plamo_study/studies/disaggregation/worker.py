"""The process that runs the cells of this study: the receiver, which starts the sender."""

from plamo_study.measure import worker
from plamo_study.studies.disaggregation import service, shipment

if __name__ == "__main__":
    worker.main({"shipment": shipment.run, "service": service.run})
