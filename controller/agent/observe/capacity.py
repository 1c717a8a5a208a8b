"""What this node has, for the controller to know which jobs fit: GPUs, CPUs, memory.

What does not belong here: how much of it is in use; `metrics` exposes that.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from checkpoint.memory import memory_bytes, most_host_memory_bytes
from controller.agent.config import AgentConfig
from controller.agent.observe.metrics.gpu import Nvml, load_nvml
from outlast.v1 import common_pb2


class NodeCapacity:
    """Reads what the node has; what does not change while an agent lives, once."""

    def __init__(
        self, memory_dir: Path, root: Path = Path("/"), image: str = "", topology: str = ""
    ) -> None:
        """`image` is the job's that the agent runs in, "" for the image of the agents;
        `topology` is where the node stands, "" where the agent was not told."""
        self._memory_dir = memory_dir
        self._root = root
        self._fixed = common_pb2.NodeCapacity(
            gpus=count_gpus(root / "dev"), image=image, topology=topology
        )
        if self._fixed.gpus:
            _describe_gpu(self._fixed, load_nvml())

    @classmethod
    def of(cls, config: AgentConfig) -> NodeCapacity:
        """What the agent of this configuration finds."""
        return cls(config.memory_dir, image=config.image, topology=config.topology)

    def read(self) -> common_pb2.NodeCapacity:
        """The node as it is now."""
        found = common_pb2.NodeCapacity()
        found.CopyFrom(self._fixed)
        found.cpus = len(os.sched_getaffinity(0))
        found.memory_bytes = memory_bytes(self._root)
        usage = shutil.disk_usage(self._memory_dir)
        found.host_memory_bytes = most_host_memory_bytes(self._memory_dir, self._root)
        found.host_memory_free_bytes = min(usage.free, found.host_memory_bytes)
        return found


def count_gpus(device_dir: Path = Path("/dev")) -> int:
    """NVIDIA GPUs by their device files, as the agent has no CUDA of its own."""
    return len(list(device_dir.glob("nvidia[0-9]*")))


def _describe_gpu(capacity: common_pb2.NodeCapacity, nvml: Nvml | None) -> None:
    if nvml is None:
        return
    try:
        first = nvml.nvmlDeviceGetHandleByIndex(0)
        name = nvml.nvmlDeviceGetName(first)
        capacity.gpu_model = name.decode() if isinstance(name, bytes) else str(name)
        capacity.gpu_memory_bytes = int(nvml.nvmlDeviceGetMemoryInfo(first).total)
    except nvml.NVMLError:
        # A model that is not known is no reason for an agent not to start.
        return
