"""Opening the black box of a worker, with as many records as its job asks for."""

from __future__ import annotations

import json

from outlast.blackbox.writer import Writer
from outlast.worker_contract import BLACK_BOX_RECORDS, WorkerContract


def open_black_box(contract: WorkerContract) -> Writer:
    """The box that the agent of this worker reads."""
    resources = json.loads(contract.spec_json).get("resources", {})
    return Writer(
        contract.blackbox_path,
        rank=contract.rank,
        world_size=contract.world_size,
        attempt=contract.attempt,
        records=resources.get("black_box_records", BLACK_BOX_RECORDS),
    )
