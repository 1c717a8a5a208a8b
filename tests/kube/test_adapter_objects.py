"""Manifests of the objects that the adapter makes, and how it reads those of the cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.agent.__main__ import parse
from controller.kube import objects
from controller.kube.config import KubeConfig
from controller.kube.objects import checked
from controller.kube.observed import read_host, read_pod
from outlast.ids import NodeId
from outlast.log_format import LogFormat
from tests.kube.views import CONFIG, pod


def test_agent_takes_all_devices_of_a_host_of_its_own() -> None:
    spec = objects.agent_pod(CONFIG, "outlast-agent-0", "anchor-uid")["spec"]
    (container,) = spec["containers"]
    assert container["resources"] == {
        "limits": {"nvidia.com/gpu": "8"},
        "requests": {"nvidia.com/gpu": "8"},
    }
    rule = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    # Agents of other fleets, in whatever namespace, want the same devices.
    assert [(term["topologyKey"], term["namespaceSelector"]) for term in rule] == [
        ("kubernetes.io/hostname", {})
    ]
    assert {t["key"]: t.get("tolerationSeconds") for t in spec["tolerations"]} == {
        "node.kubernetes.io/unreachable": 30,
        "node.kubernetes.io/not-ready": 30,
        "nvidia.com/gpu": None,
    }
    assert spec["automountServiceAccountToken"] is False


def test_arguments_are_those_that_the_agent_takes() -> None:
    of_all = replace(CONFIG, agent_options=("--log-format", "json"))
    spec = objects.agent_pod(of_all, "outlast-agent-0", "anchor-uid")["spec"]
    (container,) = spec["containers"]
    given = [
        argument.replace("$(OUTLAST_NODE)", "host-1").replace("$(OUTLAST_ADDRESS)", "10.0.0.7")
        for argument in container["args"]
    ]
    config = parse(given)
    assert (config.node, config.address, config.workers) == ("host-1", "10.0.0.7", 8)
    assert config.controller == "outlast-controller.train:7070"
    assert config.log_format is LogFormat.JSON
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for folder in (config.state_dir, config.memory_dir, config.data_dir):
        assert any(folder.is_relative_to(mount) for mount in mounts)
    memory = next(volume for volume in spec["volumes"] if volume["name"] == "memory")
    assert memory["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    state = next(volume for volume in spec["volumes"] if volume["name"] == "state")
    assert state["emptyDir"] == {"sizeLimit": "32Gi"}
    # A pod that took more would be evicted: the agent deletes long before that.
    assert 4 * config.state_bytes < 32 << 30


def test_pods_of_a_queue_bear_its_name_and_may_be_held_back() -> None:
    made = objects.agent_pod(replace(CONFIG, queue="team-a"), "outlast-agent-0", "uid")
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert objects.is_ours(made, CONFIG.fleet)
    probe = objects.probe_pod(
        replace(CONFIG, queue="team-a"), "outlast-agent-1", "uid", NodeId("host-1"), "host-1/7"
    )
    assert probe["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    plain = objects.agent_pod(CONFIG, "outlast-agent-0", "uid")
    assert "kueue.x-k8s.io/queue-name" not in plain["metadata"]["labels"]
    # As Kueue's webhook leaves it behind.
    gates = [{"name": "kueue.x-k8s.io/admission"}]
    held = {**made, "metadata": {**made["metadata"], "uid": "1"}}
    assert read_pod({**held, "spec": {**made["spec"], "schedulingGates": gates}}).gates == (
        "kueue.x-k8s.io/admission",
    )
    assert read_pod(held).gates == ()


def test_everything_belongs_to_the_anchor_and_bears_the_labels() -> None:
    made = objects.agent_pod(CONFIG, "outlast-agent-0", "anchor-uid")
    service = objects.service(CONFIG, "anchor-uid")
    for manifest in (made, service):
        (owner,) = manifest["metadata"]["ownerReferences"]
        assert (owner["name"], owner["uid"]) == ("outlast-anchor", "anchor-uid")
    labels = made["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert set(objects.selector("outlast").split(",")) <= {f"{k}={v}" for k, v in labels.items()}
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert made["spec"]["subdomain"] == service["metadata"]["name"]


def test_hosts_to_avoid_are_kept_out_of_every_alternative_of_a_template() -> None:
    pools = [
        {"matchExpressions": [{"key": "pool", "operator": "In", "values": [name]}]}
        for name in ("a", "b")
    ]
    rule = "requiredDuringSchedulingIgnoredDuringExecution"
    template = {"spec": {"affinity": {"nodeAffinity": {rule: {"nodeSelectorTerms": pools}}}}}
    config = replace(CONFIG, pod_template=template)
    avoid = (NodeId("host-1"), NodeId("host-2"))
    made = objects.agent_pod(config, "outlast-agent-0", "anchor-uid", avoid)
    affinity = made["spec"]["affinity"]
    terms = affinity["nodeAffinity"][rule]["nodeSelectorTerms"]
    assert [term["matchExpressions"] for term in terms] == [p["matchExpressions"] for p in pools]
    for term in terms:
        assert [(n["operator"], n["values"]) for n in term["matchFields"]] == [
            ("NotIn", ["host-1"]),
            ("NotIn", ["host-2"]),
        ]
    assert "podAntiAffinity" in affinity
    seen = read_pod({**made, "metadata": {**made["metadata"], "uid": "u"}})
    assert seen.avoids == set(avoid)
    assert pools[0].keys() == {"matchExpressions"}


def test_probe_goes_to_its_host_past_cordon_and_taint() -> None:
    made = objects.probe_pod(CONFIG, "outlast-agent-0", "uid", NodeId("host-1"), "host-1/100")
    affinity = made["spec"]["affinity"]["nodeAffinity"]
    rule = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["nodeSelectorTerms"] == [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["host-1"]}]}
    ]
    tolerated = {item["key"] for item in made["spec"]["tolerations"]}
    assert {"outlast.dev/fault", "node.kubernetes.io/unschedulable"} <= tolerated
    seen = read_pod({**made, "metadata": {**made["metadata"], "uid": "u"}})
    assert seen.probes == "host-1/100"
    ordinary = objects.agent_pod(CONFIG, "outlast-agent-0", "uid")
    assert "outlast.dev/fault" not in {item["key"] for item in ordinary["spec"]["tolerations"]}


def test_pod_mounts_the_secret_of_the_join_token_and_shows_it() -> None:
    made = objects.agent_pod(replace(CONFIG, join_token_secret="join"), "outlast-agent-0", "uid")
    (container,) = made["spec"]["containers"]
    (mount,) = [item for item in container["volumeMounts"] if item["name"] == "join-token"]
    (volume,) = [item for item in made["spec"]["volumes"] if item["name"] == "join-token"]
    assert volume["secret"]["secretName"] == "join"
    assert mount["readOnly"]
    shown = container["args"][container["args"].index("--join-token-file") + 1]
    assert shown == f"{mount['mountPath']}/token"
    plain = objects.agent_pod(CONFIG, "outlast-agent-0", "uid")["spec"]
    assert "--join-token-file" not in plain["containers"][0]["args"]
    assert "join-token" not in [item["name"] for item in plain["volumes"]]


def test_template_is_merged_by_name() -> None:
    config = replace(
        CONFIG,
        pod_template={
            "metadata": {"labels": {"team": "llm"}},
            "spec": {
                "nodeSelector": {"pool": "gpu"},
                "tolerations": [{"key": "dedicated", "operator": "Exists"}],
                "containers": [
                    {
                        "name": "agent",
                        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
                        "resources": {"limits": {"rdma/hca": "8"}},
                    }
                ],
            },
        },
    )
    made = objects.agent_pod(config, "outlast-agent-0", "anchor-uid")
    (container,) = made["spec"]["containers"]
    assert made["metadata"]["labels"]["team"] == "llm"
    assert made["spec"]["nodeSelector"] == {"pool": "gpu"}
    assert [item["name"] for item in container["env"]] == [
        "OUTLAST_NODE",
        "OUTLAST_ADDRESS",
        "NCCL_DEBUG",
    ]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "rdma/hca": "8"}
    assert container["image"] == "outlast:1"
    assert {"key": "dedicated", "operator": "Exists"} in objects.tolerations(config)


def test_new_pods_take_the_lowest_names_that_are_free() -> None:
    held = [pod("outlast-agent-0"), pod("outlast-agent-2", phase="Failed"), pod("another")]
    assert objects.free_names("outlast", held, 3) == [
        "outlast-agent-1",
        "outlast-agent-3",
        "outlast-agent-4",
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"namespace": "Train"}, "namespace is 'Train'"),
        ({"fleet": ""}, "fleet is ''"),
        ({"image": ""}, "image is empty"),
        ({"workers": 0}, "workers is 0"),
        ({"num_devices": -1}, "num_devices is -1"),
        # A key without a value would take away what keeps two agents off one host.
        ({"pod_template": {"spec": {"affinity": None}}}, "pod.spec.affinity is None"),
        ({"pod_template": {"spec": {"containers": {"name": "agent"}}}}, "must be a list"),
        (
            {"pod_template": {"spec": {"affinity": {"nodeAffinity": ["pool"]}}}},
            "pod_template does not fit",
        ),
    ],
)
def test_config_that_makes_no_sense_is_refused(changes: dict[str, object], says: str) -> None:
    values: dict[str, object] = {"namespace": "n", "image": "i", "controller": "c:1"}
    with pytest.raises(ValueError, match=says):
        checked(KubeConfig(**{**values, **changes}))  # type: ignore[arg-type]  # wrong on purpose


def test_reading_a_bare_host_and_a_bare_pod() -> None:
    seen = read_host({"metadata": {"name": "host-1", "resourceVersion": "3"}})
    assert (seen.name, seen.not_ready, seen.unschedulable, seen.taints) == ("host-1", "", False, ())
    bare = read_pod({"metadata": {"name": "p", "uid": "u"}})
    assert (bare.host, bare.phase, bare.deleting, bare.is_alive) == (None, "Pending", False, True)


def test_reading_what_a_host_and_a_pod_complain_of() -> None:
    condition = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
    document = {
        "metadata": {"name": "host-1", "resourceVersion": "3"},
        "status": {"conditions": [{"type": "DiskPressure", "status": "False"}, condition]},
    }
    assert read_host(document).not_ready == "Ready is Unknown (NodeStatusUnknown)"
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
    document = {
        "metadata": {"name": "p", "uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"nodeName": "host-1"},
        "status": {"phase": "Pending", "containerStatuses": [{"state": waiting}]},
    }
    seen = read_pod(document)
    assert seen.detail == "ErrImagePull: no such image"
    assert seen.deleting
    assert not seen.is_alive
