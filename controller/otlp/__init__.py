"""Export of logs by OTLP, the protocol of OpenTelemetry: an extra (`outlast[otlp]`)."""
