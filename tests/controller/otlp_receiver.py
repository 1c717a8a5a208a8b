"""A receiver of logs by OTLP, over HTTP or gRPC, that keeps what it gets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.logs.v1.logs_service_pb2_grpc import (
    LogsServiceServicer,
    add_LogsServiceServicer_to_server,
)

Attributes = dict[str, str | int]


class Received:
    """Every record that came: its body, severity, scope and attributes, the resource's included."""

    def __init__(self) -> None:
        self.url = ""
        self._lock = threading.Lock()
        self._requests: list[ExportLogsServiceRequest] = []

    def take(self, request: ExportLogsServiceRequest) -> None:
        with self._lock:
            self._requests.append(request)

    def records(self) -> list[tuple[str, str, str, Attributes]]:
        """In the order in which they came."""
        with self._lock:
            requests = list(self._requests)
        return [
            (
                record.body.string_value,
                record.severity_text,
                of_scope.scope.name,
                _values(of_resource.resource.attributes) | _values(record.attributes),
            )
            for request in requests
            for of_resource in request.resource_logs
            for of_scope in of_resource.scope_logs
            for record in of_scope.log_records
        ]

    def find(self, body: str) -> list[tuple[str, str, str, Attributes]]:
        """Records with this in their bodies."""
        return [each for each in self.records() if body in each[0]]


def _values(attributes: Any) -> Attributes:
    return {
        each.key: each.value.int_value
        if each.value.HasField("int_value")
        else each.value.string_value
        for each in attributes
    }


@contextmanager
def http_receiver() -> Iterator[Received]:
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            is_logs = self.path == "/v1/logs"
            if is_logs:
                received.take(ExportLogsServiceRequest.FromString(body))
            self.send_response(200 if is_logs else 404)
            self.end_headers()
            self.wfile.write(ExportLogsServiceResponse().SerializeToString())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        received.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield received
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def grpc_receiver() -> Iterator[Received]:
    received = Received()

    class Servicer(LogsServiceServicer):
        def Export(
            self, request: ExportLogsServiceRequest, context: Any
        ) -> ExportLogsServiceResponse:
            received.take(request)
            return ExportLogsServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_LogsServiceServicer_to_server(Servicer(), server)
    received.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield received
    finally:
        server.stop(None).wait()
