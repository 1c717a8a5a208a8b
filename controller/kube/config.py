"""What the adapter must know of a cluster, and its bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from controller.kube.conditions import COMMON, ClosingCondition
from outlast.ids import NAME_PATTERN

NVIDIA_GPU = "nvidia.com/gpu"
ZONE = "topology.kubernetes.io/zone"
USUAL_FLEET = "outlast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long things may take, in seconds."""

    request_s: float = 10.0
    """One call of the API server, its answer included."""
    watch_s: float = 30.0
    """The server ends each watch so often; it goes on from where it was."""
    dead_link_s: float = 10.0
    """A watch that is silent for so much longer than `watch_s` has a dead link."""
    resync_s: float = 600.0
    """Everything is listed again so often, whatever the watches say."""
    look_s: float = 2.0
    """The difference between what is and what should be is looked for at least this often."""
    retry_s: float = 1.0
    """Before the first attempt to reach an API server again; doubles up to `retry_max_s`."""
    retry_max_s: float = 30.0
    idle_s: float = 300.0
    """A node that no job needs goes back to the cluster after so long."""
    pull_s: float = 120.0
    """From the first failure to pull a job's image until the job fails; kubelets retry."""
    join_s: float = 900.0
    """From a pod's binding until its agent must have joined; pulling an image takes minutes."""
    probe_s: float = 600.0
    """From the loss of a host until it is tried again, once, if it works by then."""
    evict_s: float = 30.0
    """From the first refused eviction until our own pod is deleted instead."""
    terminate_s: float = 30.0
    """From a pod's deletion until it is removed by force, where its host does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeConfig:
    """One fleet of agents in one namespace."""

    namespace: str
    image: str
    """Of the agents."""
    controller: str
    """host:port at which agents reach this controller."""
    fleet: str = USUAL_FLEET
    """Tells the fleets of several controllers apart; begins the names of all objects."""
    workers: int = 8
    """Ranks that a node can run."""
    device: str = NVIDIA_GPU
    """Extended resource of which a pod takes all that its host has."""
    num_devices: int = 8
    """How many each host has; 0 for hosts without devices."""
    shared_memory: str = "16Gi"
    """Of the host's memory, for checkpoints and for the workers of a node."""
    state_size: str = "32Gi"
    """Of the host's disk: logs, black boxes, tokenised data. A pod that takes more is evicted."""
    join_token_secret: str = ""
    """Secret whose key `token` agents show the controller; "" where it asks for none."""
    ca_secret: str = ""
    """Secret whose key `ca.crt` agents check the controller by; "" where it does not encrypt."""
    queue: str = ""
    """Kueue's local queue that admits each pod; "" where pods need no admission."""
    pod_template: Mapping[str, object] = field(default_factory=dict)
    """Merged into the manifest of each pod: selectors, tolerations, volumes, resources."""
    closing_conditions: tuple[ClosingCondition, ...] = COMMON
    """Conditions by which others say that a host is broken: nothing new comes there."""
    topology_labels: tuple[str, ...] = (ZONE,)
    """Labels of hosts that say where they stand, outermost first."""
    training_jobs: bool = False
    """Whether jobs are made of the namespace's TrainingJobs."""
    config_file: Path | None = None
    """A kubeconfig; None for the pod's own service account, else the default kubeconfig."""
    agent_options: tuple[str, ...] = ()
    """More of the command line of agents."""
    max_parallel: int = 16
    """API calls under way at the same time."""
    patience: Patience = Patience()

    def __post_init__(self) -> None:
        for name in ("namespace", "fleet"):
            value = getattr(self, name)
            if not NAME_PATTERN.fullmatch(value):
                raise ValueError(
                    f"{name} is {value!r}; it must be lower-case letters, digits and '-', "
                    "at most 53 of them"
                )
        if self.queue and not NAME_PATTERN.fullmatch(self.queue):
            raise ValueError(
                f"queue is {self.queue!r}; it must be the name of a LocalQueue of the namespace: "
                "lower-case letters, digits and '-'"
            )
        for name in ("image", "controller"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; agents cannot start without one")
        if self.workers < 1:
            raise ValueError(f"workers is {self.workers}; a node needs 1 or more")
        if self.num_devices < 0:
            raise ValueError(f"num_devices is {self.num_devices}; allowed: 0 or more")
