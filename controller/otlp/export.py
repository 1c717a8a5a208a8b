"""The way out, by OpenTelemetry's own exporter: HTTP or gRPC, as its variables say."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.otlp.queue import Export, ExportQueue
from controller.otlp.records import Record, RecordHandler
from outlast import __version__
from outlast.errors import FatalError

logger = logging.getLogger(__name__)

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_LOGS_ENDPOINT = "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_LOGS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP, _GRPC = "http/protobuf", "grpc"
_LOGS_PATH = "/v1/logs"


class OtlpError(FatalError):
    """Logs are to be exported, and cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where logs go to."""

    endpoint: str
    """Of all signals, as `OTEL_EXPORTER_OTLP_ENDPOINT`; "" for what the variables say."""
    protocol: str = _HTTP


def target_of(endpoint: str, variables: Mapping[str, str]) -> Target | None:
    """Where logs go to by an option and OpenTelemetry's variables; None for nowhere.

    Raises:
        OtlpError: one of them cannot be used.
    """
    if not endpoint and not variables.get(_ENDPOINT) and not variables.get(_LOGS_ENDPOINT):
        return None
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise OtlpError(
            f"--otlp-endpoint is {endpoint!r}; allowed: http://HOST:PORT or https://HOST:PORT"
        )
    name = next((name for name in _PROTOCOLS if variables.get(name)), _PROTOCOLS[1])
    protocol = variables.get(name) or _HTTP
    if protocol not in (_HTTP, _GRPC):
        raise OtlpError(f"{name} is {protocol!r}; allowed: {_HTTP} or {_GRPC}")
    return Target(endpoint=endpoint, protocol=protocol)


def start(
    service: str, endpoint: str, variables: Mapping[str, str], known: Mapping[str, str]
) -> ExportQueue | None:
    """Export the log of this process, and what else is put into the queue; None for nowhere.

    `known` are attributes of all of it.

    Raises:
        OtlpError: the option cannot be followed.
    """
    target = target_of(endpoint, variables)
    if target is None:
        return None
    attributes = {"service.name": service, "service.version": __version__, **known}
    try:
        export = _exporter(target, attributes)
    except ModuleNotFoundError as error:
        why = f"no OpenTelemetry ({error}); install it with `pip install outlast[otlp]`"
        if endpoint:
            raise OtlpError(f"--otlp-endpoint: {why}") from error
        # The variables may be meant for the scripts that run here.
        logger.warning("logs are not exported by OTLP, though %s is set: %s", _ENDPOINT, why)
        return None
    queue = ExportQueue(export)
    logging.getLogger().addHandler(RecordHandler(queue.put))
    return queue


def _exporter(target: Target, resource_attributes: Mapping[str, str]) -> Export:
    from opentelemetry._logs import LogRecord, SeverityNumber
    from opentelemetry.sdk._logs import ReadableLogRecord
    from opentelemetry.sdk._logs.export import LogRecordExporter, LogRecordExportResult
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    exporter: LogRecordExporter
    if target.protocol == _GRPC:
        from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter as ByGrpc

        exporter = ByGrpc(endpoint=target.endpoint or None)
    else:
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter as ByHttp

        base = target.endpoint.rstrip("/")
        exporter = ByHttp(endpoint=base + _LOGS_PATH if base else None)
    # What the variables say of the service comes before what we do.
    resource = Resource(dict(resource_attributes)).merge(OTELResourceDetector().detect())
    severities = {
        logging.DEBUG: SeverityNumber.DEBUG,
        logging.INFO: SeverityNumber.INFO,
        logging.WARNING: SeverityNumber.WARN,
        logging.ERROR: SeverityNumber.ERROR,
        logging.CRITICAL: SeverityNumber.FATAL,
    }

    def made(record: Record) -> ReadableLogRecord:
        severity = severities.get(record.level, SeverityNumber.UNSPECIFIED)
        is_known = severity is not SeverityNumber.UNSPECIFIED
        return ReadableLogRecord(
            LogRecord(
                timestamp=record.at_ns,
                observed_timestamp=record.at_ns,
                severity_number=severity,
                severity_text=logging.getLevelName(record.level) if is_known else None,
                body=record.body,
                attributes=record.attributes,
            ),
            resource,
            InstrumentationScope(record.scope),
        )

    def export(records: Sequence[Record]) -> bool:
        return exporter.export([made(each) for each in records]) is LogRecordExportResult.SUCCESS

    return export
