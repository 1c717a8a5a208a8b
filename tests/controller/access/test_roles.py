"""Who may call what."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from controller.access.roles import ANYBODY, RULES, Caller, Role, refusal, rule_of

PROTOS = sorted(Path(__file__).parents[3].glob("proto/outlast/v1/*.proto"))
OWN_JOB = "/outlast.v1.Jobs/CancelJob"


def test_every_method_has_a_rule_and_every_rule_a_method() -> None:
    methods = set()
    for proto in PROTOS:
        descriptor = importlib.import_module(f"outlast.v1.{proto.stem}_pb2").DESCRIPTOR
        for service in descriptor.services_by_name.values():
            methods |= {f"/{service.full_name}/{each.name}" for each in service.methods}
    assert set(RULES) == methods


def test_what_changes_something_takes_more_than_a_viewer() -> None:
    for method, rule in RULES.items():
        if rule.changes:
            assert rule.role is not None, method
            assert rule.role > Role.VIEWER, method
        if rule.of_owner:
            assert rule.changes, method


def test_probes_are_for_all_and_what_is_not_listed_is_for_viewers() -> None:
    assert rule_of("/grpc.health.v1.Health/Check") is None
    # A stream without an end.
    assert rule_of("/grpc.health.v1.Health/Watch") is not None
    reflection = rule_of("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    assert reflection is not None
    assert reflection.role is Role.VIEWER


@pytest.mark.parametrize("method", sorted(RULES))
@pytest.mark.parametrize("role", list(Role))
def test_a_role_is_refused_what_takes_a_higher_one(method: str, role: Role) -> None:
    rule = RULES[method]
    why = refusal(Caller(name="sam", role=role), rule, "sam")
    assert bool(why) is (rule.role is not None and role < rule.role)
    if why:
        assert rule.role is not None
        assert why == f"sam is {role.word}; this takes {rule.role.word}"


@pytest.mark.parametrize(
    ("role", "owner", "is_refused"),
    [
        (Role.SUBMITTER, "sam", False),
        (Role.SUBMITTER, "kim", True),
        # From a time when nobody was asked who he is.
        (Role.SUBMITTER, "", True),
        # There is no such job, which the service says.
        (Role.SUBMITTER, None, False),
        (Role.OPERATOR, "kim", False),
        (Role.ADMIN, "", False),
    ],
)
def test_jobs_of_others_take_an_operator(role: Role, owner: str | None, is_refused: bool) -> None:
    why = refusal(Caller(name="sam", role=role), RULES[OWN_JOB], owner)
    assert bool(why) is is_refused


def test_a_node_may_make_the_calls_of_nodes_only() -> None:
    node = Caller(name="n0", role=None)
    for method, rule in RULES.items():
        assert bool(refusal(node, rule, None)) is (rule.role is not None), method


def test_where_nobody_is_asked_everybody_may_do_everything() -> None:
    for owner in (None, "", "kim"):
        assert not any(refusal(ANYBODY, rule, owner) for rule in RULES.values())
