"""The OpenAPI document has every route, and answers are as it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.routing import Route

from controller.access.audit import Audit
from controller.access.callers import Callers
from controller.web.api import Api
from controller.web.gateway import Gateway
from controller.web.login import LoginRoutes
from controller.web.messages import as_json
from outlast.v1 import incidents_pb2, jobs_pb2, nodes_pb2, ranks_pb2
from tests.web.schemas import DOCUMENT, wrong


def test_every_route_is_told_and_no_other() -> None:
    routes = Api(Gateway(), dict, LoginRoutes(Callers(), Audit(Path()))).routes()
    there = {(route.path, verb.lower()) for route in routes for verb in verbs(route)}
    told = {(path, verb) for path, each in DOCUMENT["paths"].items() for verb in each}
    assert told == there


def test_every_reference_leads_somewhere() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    found = {name.rpartition("/")[2] for name in references(DOCUMENT)}
    assert found == set(schemas)
    json.dumps(DOCUMENT)


def test_parameters_of_paths_are_those_of_the_path() -> None:
    for path, operations in DOCUMENT["paths"].items():
        for operation in operations.values():
            names = [each["name"] for each in operation["parameters"] if each["in"] == "path"]
            assert all(f"{{{name}}}" in path for name in names)
            assert path.count("{") == len(names)


def test_messages_are_as_their_schemas_say() -> None:
    job = jobs_pb2.Job(job_id="a", loss=float("nan"), seconds={"productive": 1.0})
    job.step_use.peak_memory_bytes = 2**40
    incident = incidents_pb2.Incident(incident_id="a.i1", culprit_nodes=["n"])
    incident.evidence.add(kind="worker_exit", rank=3)
    rank = ranks_pb2.Rank(rank=1, entered={"dp": 4})
    rank.last_operation.op = "send"
    for message in (job, jobs_pb2.Job(), incident, rank, ranks_pb2.Rank(), nodes_pb2.Node()):
        assert wrong(as_json(message), {"$ref": f"#/{message.DESCRIPTOR.name}"}) == []
    assert as_json(job)["loss"] is None
    assert wrong({"rank": "1"}, {"$ref": "#/Rank"})


def verbs(route: Route) -> set[str]:
    return (route.methods or set()) - {"HEAD"}


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)
