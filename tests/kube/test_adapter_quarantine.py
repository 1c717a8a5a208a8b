"""Quarantine of a host: what it sets, what it leaves alone, and how it ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from controller.kube import quarantine
from controller.kube.observed import Host, Json, Taint, read_host
from tests.kube.views import FLEET, host

WANTED = quarantine.Quarantine(
    session="host-1/1700000000", fleet=FLEET, reason="2 XID 79", since_s=1_700_000_000.0
)
OTHERS = Taint(key="maintenance", effect="NoSchedule", value="tonight", time_added="2026-01-01")


def merged(document: Any, patch: Any) -> Any:
    """RFC 7386, as the API server applies it."""
    if not isinstance(patch, dict):
        return patch
    result = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def document(seen: Host) -> Json:
    """The Node object that `read_host` would make this host of."""
    taints = []
    for taint in seen.taints:
        item = {"key": taint.key, "effect": taint.effect}
        if taint.value:
            item["value"] = taint.value
        if taint.time_added:
            item["timeAdded"] = taint.time_added
        taints.append(item)
    spec: Json = {"podCIDR": "10.1.0.0/24"}
    if seen.unschedulable:
        spec["unschedulable"] = True
    if taints:
        spec["taints"] = taints
    metadata = {
        "name": seen.name,
        "resourceVersion": seen.resource_version,
        "annotations": dict(seen.annotations),
    }
    return {"metadata": metadata, "spec": spec}


def apply(seen: Host, patch: Json) -> Host:
    return read_host(merged(document(seen), patch))


def test_quarantine_closes_the_host_and_says_why() -> None:
    patch = quarantine.quarantine_patch(host("host-1"), WANTED)
    assert patch == {
        "metadata": {
            "resourceVersion": "7",
            "annotations": {
                "outlast.dev/quarantine-session": "host-1/1700000000",
                "outlast.dev/quarantine-fleet": "train/outlast",
                "outlast.dev/quarantine-reason": "2 XID 79",
                "outlast.dev/quarantine-since": "2023-11-14T22:13:20+00:00",
                "outlast.dev/quarantine-prior-cordon": "false",
                "outlast.dev/quarantine-prior-taint": "false",
            },
        },
        "spec": {
            "unschedulable": True,
            "taints": [{"key": "outlast.dev/fault", "effect": "NoSchedule"}],
        },
    }


taints = st.builds(
    Taint,
    key=st.sampled_from(["a", "b/c", "node.kubernetes.io/not-ready", quarantine.TAINT]),
    effect=st.sampled_from(["NoSchedule", "NoExecute", "PreferNoSchedule"]),
    value=st.sampled_from(["", "v"]),
    time_added=st.sampled_from(["", "2026-01-01T00:00:00Z"]),
)
hosts = st.builds(
    host,
    st.just("host-1"),
    unschedulable=st.booleans(),
    taints=st.lists(taints, max_size=3, unique_by=lambda t: (t.key, t.effect)).map(tuple),
    annotations=st.dictionaries(st.sampled_from(["x", "y"]), st.text(max_size=3)),
)


@given(hosts)
def test_release_restores_what_was_there_before(before: Host) -> None:
    during = apply(before, quarantine.quarantine_patch(before, WANTED))
    assert during.unschedulable
    assert not quarantine.human_released(during, FLEET)
    assert apply(during, quarantine.release_patch(during)) == before


@given(hosts, taints)
def test_release_leaves_what_others_set_meanwhile(before: Host, added: Taint) -> None:
    # Nobody can tell our own taint from one that is the same.
    assume((added.key, added.effect) != (quarantine.TAINT, quarantine.TAINT_EFFECT))
    during = apply(before, quarantine.quarantine_patch(before, WANTED))
    kept = [t for t in during.taints if (t.key, t.effect) != (added.key, added.effect)]
    during = replace(
        during, taints=(*kept, added), annotations={**during.annotations, "their": "note"}
    )
    after = apply(during, quarantine.release_patch(during))
    assert added in after.taints
    assert after.annotations == {**before.annotations, "their": "note"}


@given(hosts)
def test_new_session_keeps_the_memory_of_a_prior_cordon(before: Host) -> None:
    first = apply(before, quarantine.quarantine_patch(before, WANTED))
    again = replace(WANTED, session="host-1/1800000000")
    second = apply(first, quarantine.quarantine_patch(first, again))
    assert quarantine.session_of(second, FLEET) == "host-1/1800000000"
    assert apply(second, quarantine.release_patch(second)) == before


@pytest.mark.parametrize("taken", [{"spec": {}}, {"spec": {"taints": None}}])
@pytest.mark.parametrize("was_cordoned", [False, True])
def test_person_who_uncordons_has_released_the_host(taken: Json, was_cordoned: bool) -> None:
    before = host("host-1", unschedulable=was_cordoned)
    seen = apply(before, quarantine.quarantine_patch(before, WANTED))
    seen = apply(apply(seen, taken), {"spec": {"unschedulable": None}})
    assert quarantine.human_released(seen, FLEET)
    assert apply(seen, quarantine.release_patch(seen)) == host("host-1")


def test_taint_that_somebody_dropped_releases_nothing() -> None:
    seen = apply(host("host-1"), quarantine.quarantine_patch(host("host-1"), WANTED))
    seen = apply(seen, {"spec": {"taints": None}})
    assert not quarantine.human_released(seen, FLEET)
    assert apply(seen, quarantine.release_patch(seen)) == host("host-1")


@pytest.mark.parametrize(
    "theirs",
    [
        Taint(key=quarantine.TAINT, effect="NoExecute", value="x"),
        # The server keeps one taint of a key and effect.
        Taint(key=quarantine.TAINT, effect="NoSchedule", value="x"),
        Taint(key=quarantine.TAINT, effect="NoSchedule"),
    ],
)
def test_taint_of_a_person_with_our_key_outlives_the_quarantine(theirs: Taint) -> None:
    before = host("host-1", taints=(theirs,))
    during = apply(before, quarantine.quarantine_patch(before, WANTED))
    assert theirs in during.taints
    assert "outlast.dev/fault" in quarantine.closed_by_others(during, FLEET, ())
    assert apply(during, quarantine.release_patch(during)) == before


def test_quarantine_of_another_fleet_is_not_ours() -> None:
    theirs = replace(WANTED, fleet="train/other")
    seen = apply(host("host-1"), quarantine.quarantine_patch(host("host-1"), theirs))
    assert quarantine.is_anothers(seen, FLEET)
    assert not quarantine.session_of(seen, FLEET)
    assert quarantine.closed_by_others(seen, FLEET, ()) == "its host is cordoned"
    uncordoned = replace(seen, unschedulable=False)
    assert not quarantine.human_released(uncordoned, FLEET)
    assert "outlast.dev/fault" in quarantine.closed_by_others(uncordoned, FLEET, ())


def test_own_quarantine_is_nobody_elses_mark() -> None:
    seen = apply(host("host-1"), quarantine.quarantine_patch(host("host-1"), WANTED))
    assert quarantine.closed_by_others(seen, FLEET, ()) == ""


GPU = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("taint", "toleration", "closed"),
    [
        (OTHERS, None, True),
        (OTHERS, GPU, True),
        (OTHERS, {"operator": "Exists"}, False),
        (OTHERS, {"key": "maintenance", "value": "tonight"}, False),
        (OTHERS, {"key": "maintenance", "value": "tomorrow"}, True),
        (OTHERS, {"key": "maintenance", "operator": "Exists", "effect": "NoExecute"}, True),
        (Taint(key="nvidia.com/gpu", effect="NoSchedule", value="present"), GPU, False),
        (Taint(key="soft", effect="PreferNoSchedule"), None, False),
        # Conditions and the cordon itself tell the same as these.
        (Taint(key="node.kubernetes.io/unschedulable", effect="NoSchedule"), None, False),
        (Taint(key="node.kubernetes.io/unreachable", effect="NoExecute"), None, False),
    ],
)
def test_only_taints_that_our_pods_do_not_tolerate_close_a_host(
    taint: Taint, toleration: dict[str, object] | None, closed: bool
) -> None:
    tolerations = () if toleration is None else (toleration,)
    assert bool(quarantine.closed_by_others(host("h", taints=(taint,)), FLEET, tolerations)) is (
        closed
    )


def test_noexecute_taint_of_others_drives_our_pod_off() -> None:
    seen = host("h", taints=(Taint(key="gpu-health", effect="NoExecute", value="bad"),))
    told = "its host has the taint gpu-health=bad:NoExecute"
    assert quarantine.evicted_by_others(seen, FLEET, ()) == told
    assert quarantine.evicted_by_others(host("h", taints=(OTHERS,)), FLEET, ()) == ""
