"""Findings on their way between processes."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnostics.core.finding import CheckVerdict, Finding, Localises, Measurement, ThresholdSource
from outlast.v1 import diagnostics_pb2
from tests.diagnostics.build import finding, measurement

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@given(
    value=NUMBERS,
    threshold=st.none() | NUMBERS,
    verdict=st.sampled_from(CheckVerdict),
    source=st.sampled_from(ThresholdSource),
    localises=st.sampled_from(Localises),
    detail=st.text(),
)
def test_finding_survives_json(
    value: float,
    threshold: float | None,
    verdict: CheckVerdict,
    source: ThresholdSource,
    localises: Localises,
    detail: str,
) -> None:
    sent = finding(
        verdict,
        value=value,
        threshold=threshold,
        threshold_source=source,
        localises=localises,
        detail=detail,
    )
    line = sent.to_json()
    assert "\n" not in line
    assert Finding.from_json(line) == sent


def test_measurement_survives_json() -> None:
    sent = measurement(80.0, at_most=0.0, bad_is_fault=False, contended_ratio=0.5)
    assert Measurement.from_json(sent.to_json()) == sent


def test_finding_mirrors_the_protobuf_message() -> None:
    sent = finding(CheckVerdict.WARN)
    message = diagnostics_pb2.Finding(**sent.to_fields())
    assert message.verdict == "warn"
    assert message.threshold == 40.0
    assert {field.name for field in message.DESCRIPTOR.fields} == json.loads(sent.to_json()).keys()


def test_absent_threshold_stays_absent_in_the_protobuf_message() -> None:
    fields = finding(CheckVerdict.PASS, threshold=None).to_fields()
    assert not diagnostics_pb2.Finding(**fields).HasField("threshold")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="value is"):
        finding(CheckVerdict.PASS, value=number)


def change(line: str, **changes: object) -> str:
    return json.dumps({**json.loads(line), **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"verdict": "perhaps"}, "perhaps"),
        ({"value": "80"}, "Finding.value"),
        ({"value": True}, "Finding.value"),
        ({"value": None}, "Finding.value"),
        ({"node": 3}, "Finding.node"),
        ({"surplus": 1}, "unknown fields"),
    ],
)
def test_line_that_does_not_fit_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Finding.from_json(change(finding(CheckVerdict.PASS).to_json(), **changes))


@pytest.mark.parametrize("line", ["", "null", "[]", "{}", '{"test": "compute"'])
def test_text_that_is_no_finding_is_refused(line: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's own error is one too
        Finding.from_json(line)
