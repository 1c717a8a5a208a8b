"""`outlast controller --kube-…`: what a user says, and what is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.app import Running
from controller.kube.config import KubeConfig
from controller.options import Options
from outlast.cli import kube
from outlast.cli.errors import CliError, ExitCode
from outlast.cli.serve import ready_lines
from tests.cli.running import outlast, outlast_process


def cluster(**changes: object) -> KubeConfig | None:
    values: dict[str, object] = {
        "namespace": "train",
        "image": "outlast:1",
        "fleet": "outlast",
        "workers": 8,
        "device": "nvidia.com/gpu",
        "devices": -1,
        "controller": "",
        "shared_memory": "16Gi",
        "state_size": "32Gi",
        "join_token": "",
        "ca": "",
        "pod_template": None,
        "condition": None,
        "topology": None,
        "config": None,
        "idle_s": 300.0,
        "training_jobs": False,
        "queue": "",
        "grpc": "0.0.0.0:7070",
    }
    given = {**values, **changes}
    return kube.cluster(given, str(given.pop("grpc")))


def test_agents_find_the_controller_by_its_service_and_take_a_device_for_each_rank() -> None:
    config = cluster()
    assert config is not None
    assert config.controller == "outlast-controller.train:7070"
    assert (config.workers, config.num_devices) == (8, 8)
    elsewhere = cluster(controller="10.0.0.1:99", devices=0)
    assert elsewhere is not None
    assert (elsewhere.controller, elsewhere.num_devices) == ("10.0.0.1:99", 0)


def test_port_that_agents_cannot_know_is_refused() -> None:
    with pytest.raises(CliError, match="--kube-controller"):
        cluster(grpc="0.0.0.0:0")
    assert cluster(grpc="0.0.0.0:0", controller="10.0.0.1:99") is not None


def test_secret_of_the_join_token_needs_the_controller_s_own_file(tmp_path: Path) -> None:
    config = cluster(join_token="outlast-join-token")
    assert config is not None
    assert config.join_token_secret == "outlast-join-token"
    for given in (["--kube-join-token", "one"], ["--join-token-file", str(tmp_path / "token")]):
        arguments = ["controller", "--state-dir", str(tmp_path), "--kube-namespace", "train"]
        refused = outlast(*arguments, "--kube-image", "outlast:1", *given)
        assert refused.returncode == ExitCode.BAD_INPUT
        assert "--join-token-file and --kube-join-token go together" in refused.stderr


def test_queue_is_a_name_of_the_namespace() -> None:
    config = cluster(queue="team-a")
    assert config is not None
    assert config.queue == "team-a"
    with pytest.raises(CliError, match="queue is 'Team A'; it must be the name of a LocalQueue"):
        cluster(queue="Team A")


def test_without_a_namespace_there_is_no_cluster() -> None:
    assert cluster(namespace="", image="") is None
    with pytest.raises(CliError, match="--kube-join-token"):
        cluster(namespace="", image="", join_token="one")
    with pytest.raises(CliError, match="--kube-namespace"):
        cluster(namespace="")


def test_template_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text("spec:\n  nodeSelector: {pool: gpu}\n")
    config = cluster(pod_template=path)
    assert config is not None
    assert config.pod_template == {"spec": {"nodeSelector": {"pool": "gpu"}}}


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", None])
def test_template_that_is_none_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "pod.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CliError, match=f"--kube-pod-template {path}"):
        cluster(pod_template=path)


def test_labels_that_say_where_hosts_stand_are_a_person_s_or_the_zone_s() -> None:
    assert cluster().topology_labels == ("topology.kubernetes.io/zone",)
    assert cluster(topology=["block", "rack"]).topology_labels == ("block", "rack")


def test_conditions_of_a_person_take_the_place_of_the_usual_ones() -> None:
    usual, own = cluster(), cluster(condition=["FanStopped", "LinksReady=False"])
    assert usual is not None
    assert own is not None
    assert "KernelDeadlock" in [one.kind for one in usual.closing_conditions]
    assert [(one.kind, one.status) for one in own.closing_conditions] == [
        ("FanStopped", "True"),
        ("LinksReady", "False"),
    ]
    with pytest.raises(CliError, match="condition is 'A=b'"):
        cluster(condition=["A=b"])


def test_local_nodes_and_a_cluster_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not both"):
        Options(state_dir=tmp_path, local_nodes=1, kube=cluster())


def test_person_is_told_that_agents_outlive_the_controller(tmp_path: Path) -> None:
    options = Options(state_dir=tmp_path, kube=cluster())
    lines = ready_lines(options, Running(grpc="a:1", http="a:2", term=1))
    assert "Nodes come from the Kubernetes namespace train." in lines
    assert lines[-1] == "Ctrl-C stops the controller only; agents and training go on."


def test_controller_without_credentials_says_what_to_do(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    done = outlast_process(
        *("controller", "--state-dir", str(tmp_path / "state")),
        *("--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"),
        *("--kube-namespace", "train", "--kube-image", "outlast:1"),
        *("--kube-config", str(missing), "--kube-controller", "10.0.0.1:7070"),
    )
    assert done.returncode == 2
    assert "no Kubernetes cluster" in done.stderr
    assert "--kube-config" in done.stderr
    assert "Traceback" not in done.stderr
