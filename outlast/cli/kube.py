"""The options of `outlast controller` that name a Kubernetes cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.errors import CliError, bad_input

if TYPE_CHECKING:
    from controller.kube.config import KubeConfig

CONTROLLER_SERVICE = "outlast-controller"

Namespace = Annotated[
    str,
    typer.Option(
        "--kube-namespace", metavar="NAME", help="Run agents in pods of this Kubernetes namespace."
    ),
]
Image = Annotated[
    str, typer.Option("--kube-image", metavar="IMAGE", help="The image of the agents.")
]
Fleet = Annotated[
    str,
    typer.Option("--kube-fleet", metavar="NAME", help="Tells the fleets of a namespace apart."),
]
Workers = Annotated[
    int, typer.Option("--kube-workers", min=1, help="Ranks that a node can run.", metavar="N")
]
Device = Annotated[
    str,
    typer.Option("--kube-device", metavar="RESOURCE", help="What a host's devices are called."),
]
Devices = Annotated[
    int,
    typer.Option(
        "--kube-devices",
        min=-1,
        metavar="N",
        help="Devices on each host, all of which a pod takes; 0: none, -1: one for each rank.",
    ),
]
AgentsDial = Annotated[
    str,
    typer.Option(
        "--kube-controller",
        metavar="HOST:PORT",
        help=f"Where agents find this controller; by default {CONTROLLER_SERVICE}.NAMESPACE "
        "and the port of --grpc.",
    ),
]
SharedMemory = Annotated[
    str,
    typer.Option(
        "--kube-shared-memory",
        metavar="QUANTITY",
        help="Host memory of a pod for checkpoints and its workers.",
    ),
]
StateSize = Annotated[
    str,
    typer.Option(
        "--kube-state-size",
        metavar="QUANTITY",
        help="Disk of a pod for logs, black boxes and tokenised data, at most.",
    ),
]
JoinToken = Annotated[
    str,
    typer.Option(
        "--kube-join-token",
        metavar="SECRET",
        help="The Secret of the namespace whose key `token` is the content of --join-token-file.",
    ),
]
CaSecret = Annotated[
    str,
    typer.Option(
        "--kube-ca",
        metavar="SECRET",
        help="The Secret of the namespace whose key `ca.crt` agents check this controller by.",
    ),
]
PodTemplate = Annotated[
    Path | None,
    typer.Option(
        "--kube-pod-template",
        metavar="FILE",
        help="YAML that is merged into each agent's pod: selectors, tolerations, volumes.",
    ),
]
Conditions = Annotated[
    list[str] | None,
    typer.Option(
        "--kube-condition",
        metavar="TYPE[=STATUS]",
        help="A condition by which others say that a host is broken; for many give it again. "
        "Takes the place of the usual ones.",
    ),
]
Topology = Annotated[
    list[str] | None,
    typer.Option(
        "--kube-topology",
        metavar="LABEL",
        help="A label of hosts that says where they stand; for several, outermost first, give it "
        "again. By default topology.kubernetes.io/zone.",
    ),
]
TrainingJobs = Annotated[
    bool,
    typer.Option(
        "--kube-training-jobs",
        help="Run the namespace's TrainingJobs, which deploy/kubernetes defines, as jobs.",
    ),
]
Queue = Annotated[
    str,
    typer.Option(
        "--kube-queue",
        metavar="NAME",
        help="The LocalQueue of Kueue that admits the pods of agents; none by default.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--kube-config",
        metavar="FILE",
        help="A kubeconfig; by default the pod's service account, else the usual kubeconfig.",
    ),
]
IdleS = Annotated[
    float,
    typer.Option(
        "--kube-idle-s",
        min=0,
        metavar="SECONDS",
        help="A node that no job needs goes back to the cluster after so long.",
    ),
]


def given(params: Mapping[str, Any]) -> dict[str, Any]:
    """The options of Kubernetes among a command's, without the beginning of their names."""
    begins = "kube_"
    return {
        name.removeprefix(begins): value
        for name, value in params.items()
        if name.startswith(begins)
    }


def cluster(options: Mapping[str, Any], grpc: str) -> KubeConfig | None:
    """The cluster that the options name; None without a namespace.

    Raises:
        CliError: the options do not fit together.
    """
    from controller.kube.conditions import COMMON, parse
    from controller.kube.config import ZONE, KubeConfig, Patience
    from controller.kube.objects import checked

    namespace, workers = options["namespace"], options["workers"]
    if not namespace:
        for name in ("image", "join_token", "ca", "queue"):
            if options[name]:
                option = f"--kube-{name.replace('_', '-')}"
                raise CliError(f"{option} is given without --kube-namespace")
        return None
    conditions = options["condition"]
    with bad_input("--kube-…: "):
        config = KubeConfig(
            namespace=namespace,
            image=options["image"],
            controller=options["controller"] or _service_address(namespace, grpc),
            fleet=options["fleet"],
            workers=workers,
            device=options["device"],
            num_devices=workers if options["devices"] < 0 else options["devices"],
            shared_memory=options["shared_memory"],
            state_size=options["state_size"],
            join_token_secret=options["join_token"],
            ca_secret=options["ca"],
            pod_template=_template(options["pod_template"]),
            closing_conditions=tuple(map(parse, conditions)) if conditions else COMMON,
            topology_labels=tuple(options["topology"] or (ZONE,)),
            training_jobs=options["training_jobs"],
            queue=options["queue"],
            config_file=options["config"],
            patience=Patience(idle_s=options["idle_s"]),
        )
        return checked(config)


def cluster_of(
    params: Mapping[str, Any], grpc: str, join_token_file: Path | None, tls_dir: Path | None
) -> KubeConfig | None:
    """The cluster that a command's options name, which has the secrets that its agents need.

    Raises:
        CliError: the options do not fit together.
    """
    return check_secrets(cluster(given(params), grpc), join_token_file, tls_dir)


def check_secrets(
    cluster: KubeConfig | None, join_token_file: Path | None, tls_dir: Path | None
) -> KubeConfig | None:
    """The same cluster: what the controller asks for and shows goes with what agents' pods have.

    Raises:
        CliError: only one of them is.
    """
    if cluster is not None and bool(join_token_file) != bool(cluster.join_token_secret):
        raise CliError(
            "--join-token-file and --kube-join-token go together: the first is what this "
            "controller asks for, the second the Secret from which agents' pods have it"
        )
    if cluster is not None and bool(tls_dir) != bool(cluster.ca_secret):
        raise CliError(
            "--tls-dir and --kube-ca go together: the first has this controller's certificate, the "
            "second is the Secret from which agents' pods have the ca.crt that signed it"
        )
    return cluster


def _service_address(namespace: str, grpc: str) -> str:
    _, _, port = grpc.rpartition(":")
    if port == "0":
        raise CliError(
            "--grpc takes any free port, which agents cannot know beforehand: give a port, or say "
            "with --kube-controller where they find this controller"
        )
    return f"{CONTROLLER_SERVICE}.{namespace}:{port}"


def _template(path: Path | None) -> dict[str, object]:
    import yaml

    if path is None:
        return {}
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise CliError(f"--kube-pod-template {path}: {error}") from error
    if not isinstance(document, dict):
        raise CliError(f"--kube-pod-template {path}: it must be an object, such as `spec: …`")
    return document
