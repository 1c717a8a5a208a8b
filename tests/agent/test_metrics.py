"""What an agent tells of its machine, from texts that real machines have printed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import Metric

from controller.agent.observe.metrics import RankReading, gpu, host, network, ranks
from controller.agent.observe.metrics.host import Disk, Folders
from controller.agent.observe.metrics.network import Device
from diagnostics.core.traffic import Rates, Window
from outlast.blackbox import Expected, Group, Op, Phase, Reader, StepUse, TimeUse, Writer

STAT = """cpu  2255 34 2290 22625563 6290 127 456 12 0 0
cpu0 1132 34 1441 11311718 3675 127 438 10 0 0
intr 114930548 113199788
"""
MEMINFO = """MemTotal:       24689764 kB
MemFree:        11113500 kB
MemAvailable:   20113500 kB
HugePages_Total:       0
"""
DISKSTATS = """   7       0 loop0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
 259       0 nvme0n1 24130 8 1653094 10276 13131 9512 1076512 15724 0 9020 26000 0 0 0 0 0 0
 259       1 nvme0n1p1 20000 8 1600000 10000 13000 9500 1076000 15000 0 9000 25000 0 0 0 0 0 0
"""
# The first two lines are headings, whatever they say.
NET_DEV = """Inter-|   Receive            |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop ...
    lo: 96224 114 0 0 0 0 0 0 96224 114 0 0 0 0 0 0
  eth0: 5000 50 1 2 0 0 0 0 7000 70 3 4 0 0 0 0
  ifb0:       0       0    0    0    0     0          0         0        0       0    0    0 0 0 0 0
"""


def samples(families: Iterable[Metric]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Every sample by name and label values."""
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def test_cpu_time_is_of_all_processors_together() -> None:
    assert dict(host.cpu_ticks(STAT))["user"] == 2255
    assert dict(host.cpu_ticks(STAT))["steal"] == 12
    assert host.cpu_ticks("") == []


def test_memory_table_ignores_what_is_no_number() -> None:
    assert host.number_table(MEMINFO + "Strange: line\n\n")["MemAvailable"] == 20113500


def test_disks_count_in_bytes_and_seconds() -> None:
    assert host.disk_lines(DISKSTATS)[0] == Disk(
        device="nvme0n1", read_bytes=1653094 * 512, written_bytes=1076512 * 512, busy_s=9.02
    )


def test_network_devices_that_were_never_used_are_left_out() -> None:
    lo, eth0 = network.device_lines(NET_DEV)
    assert lo.name == "lo"
    assert eth0 == Device(name="eth0", received_bytes=5000, sent_bytes=7000, errors=4, dropped=6)


def test_machine_is_read_below_a_root(tmp_path: Path) -> None:
    tree = {
        "proc/stat": STAT,
        "proc/meminfo": MEMINFO,
        "proc/vmstat": "nr_free_pages 2\noom_kill 3\n",
        "proc/diskstats": DISKSTATS,
        "proc/net/dev": NET_DEV,
        "sys/block/nvme0n1/size": "1",
        "sys/class/net/eth0/carrier_down_count": "2\n",
        "sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data": "250\n",
        "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data": "500\n",
        "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed": "1\n",
    }
    for name, text in tree.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    folders = Folders(state_dir=tmp_path, memory_dir=tmp_path, data_dir=tmp_path / "none")
    found = samples([*host.collect(tmp_path, folders), *network.collect(tmp_path, {})])
    assert found["outlast_host_oom_kills_total", ()] == 3
    assert found["outlast_host_memory_available_bytes", ()] == 20113500 * 1024
    # Of the disk itself; its partitions are parts of it.
    disks = [labels for name, labels in found if name == "outlast_host_disk_busy_seconds_total"]
    assert disks == [("nvme0n1",)]
    assert found["outlast_nic_link_down_events_total", ("eth0",)] == 2
    assert found["outlast_rdma_bytes_total", ("mlx5_0", "1", "received")] == 1000
    assert found["outlast_rdma_errors_total", ("mlx5_0", "1", "link_down")] == 1
    free = [labels for name, labels in found if name == "outlast_host_filesystem_free_bytes"]
    assert free == [("state",), ("memory",)]


def test_windows_of_links_are_figures(tmp_path: Path) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/dev").write_text(NET_DEV)
    window = Window(
        is_rdma=False,
        seconds=2.0,
        num_samples=400,
        received=Rates(least=0, mean=3e6, most=8e6),
        sent=Rates(least=1, mean=2, most=3),
        longest_silence_s=0.4,
        period_s=None,
    )
    windows = {"eth0": window, "mlx5_0/1": replace(window, period_s=1.25)}
    found = samples([*network.collect(tmp_path, windows)])
    rate = "outlast_link_window_bytes_per_second"
    assert found[rate, ("eth0", "received", "most")] == 8e6
    assert found[rate, ("mlx5_0/1", "sent", "least")] == 1
    assert found["outlast_link_longest_silence_seconds", ("eth0",)] == 0.4
    periods = {labels: value for (name, labels), value in found.items() if "period" in name}
    assert periods == {("mlx5_0/1",): 1.25}


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    folders = Folders(state_dir=tmp_path, memory_dir=tmp_path, data_dir=tmp_path)
    found = samples([*host.collect(Path("/"), folders), *network.collect(Path("/"), {})])
    assert found["outlast_host_cpu_seconds_total", ("user",)] > 0
    assert found["outlast_host_memory_size_bytes", ()] > 2**20


def test_black_box_tells_where_the_time_of_a_rank_went(tmp_path: Path) -> None:
    path = tmp_path / "box"
    writer = Writer(path, rank=0, world_size=1, attempt=1)
    writer.phase(Phase.FORWARD_BACKWARD)
    writer.enter(Op.ALL_REDUCE, Group.TP)
    writer.leave()
    writer.phase(Phase.OPTIMIZER)
    reader = Reader(path)
    use = reader.time_use()
    reader.close()
    writer.close()
    assert set(use.operations_s) == {(Phase.FORWARD_BACKWARD, Group.TP)}
    inside = use.operations_s[Phase.FORWARD_BACKWARD, Group.TP]
    assert 0 < inside <= use.phases_s[Phase.FORWARD_BACKWARD]
    # What still goes on has not been spent yet.
    assert Phase.OPTIMIZER not in use.phases_s


def test_own_work_of_a_rank_is_what_operations_leave_of_forward_and_backward() -> None:
    use = TimeUse(
        phases_s={Phase.FORWARD_BACKWARD: 10.0, Phase.CHECKPOINT: 1.0},
        operations_s={
            (Phase.FORWARD_BACKWARD, Group.PP): 3.0,
            (Phase.FORWARD_BACKWARD, Group.TP): 2.0,
            (Phase.GRADIENT_SYNC, Group.DP): 4.0,
        },
    )
    rank = RankReading(
        job_id="job",
        rank=3,
        stage=1,
        completed_step=7,
        phase=Phase.DATA,
        is_in_operation=False,
        op_seq=9,
        time_use=use,
        step_use=StepUse(
            forward_ns=10**9,
            backward_ns=2 * 10**9,
            busy_ns=3 * 10**9,
            waited_ns=10**9,
            hidden_ns={Group.TP: 5 * 10**8},
            sent_bytes={Group.DP: 4096},
            data_wait_ns=25 * 10**7,
            data_waits=3,
            peak_memory_bytes=2**20,
        ),
        expected=Expected(memory_bytes=2**21, bubble=0.2),
    )
    found = samples(ranks.collect([rank]))
    assert found["outlast_rank_phase_info", ("job", "3", "1", "data")] == 1
    assert found["outlast_rank_in_operation", ("job", "3", "1")] == 0
    assert found["outlast_rank_work_seconds_total", ("job", "3", "1")] == 5.0
    assert found["outlast_rank_phase_seconds_total", ("job", "3", "1", "checkpoint")] == 1.0
    labels = ("job", "3", "1", "gradient_sync", "dp")
    assert found["outlast_rank_communication_seconds_total", labels] == 4.0
    who = ("job", "3", "1")
    assert found["outlast_rank_compute_seconds_total", (*who, "backward")] == 2.0
    assert found["outlast_rank_communication_hidden_seconds_total", (*who, "tp")] == 0.5
    assert found["outlast_rank_sent_bytes_total", (*who, "dp")] == 4096
    assert found["outlast_rank_pipeline_seconds_total", (*who, "waiting")] == 1.0
    assert found["outlast_rank_expected_bubble_ratio", who] == 0.2
    assert found["outlast_rank_data_wait_seconds_total", who] == 0.25
    assert found["outlast_rank_data_waits_total", who] == 3
    assert found["outlast_rank_memory_peak_bytes", who] == 2**20
    assert found["outlast_rank_expected_memory_bytes", who] == 2**21


class FakeNvmlError(Exception):
    """What the binding raises."""


class FakeNvml:
    """The calls of NVML that are used, answering as one H100 SXM does under load.

    Values are those that `nvidia-smi -q` prints for such a card, in NVML's units.
    """

    NVMLError = FakeNvmlError
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, xids: Iterable[int] = ()) -> None:
        self._xids = list(xids)
        self.is_off_the_bus = False

    def _answer(self, value: Any) -> Any:
        if self.is_off_the_bus:
            raise FakeNvmlError("GPU is lost")
        return value

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"handle-{index}"

    def nvmlDeviceGetIndex(self, handle: str) -> int:
        return int(self._answer(int(handle.removeprefix("handle-"))))

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return "GPU-0c8a2a5e"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return self._answer(SimpleNamespace(gpu=97, memory=41))

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return self._answer(SimpleNamespace(total=85520809984, used=71303168000))

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return int(self._answer(61))

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return int(self._answer(653210))

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        raise FakeNvmlError("Not Supported")

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return int(self._answer(1980))

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        return int(self._answer([4, 0][kind]))

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: str) -> None:
        pass

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:
        if not self._xids:
            raise FakeNvmlError("Timeout")
        return SimpleNamespace(device="handle-0", eventData=self._xids.pop(0))


def test_gpu_is_told_in_base_units() -> None:
    found = samples(gpu.Gpus(FakeNvml()).collect())
    assert found["outlast_gpu_utilization_ratio", ("0",)] == 0.97
    assert found["outlast_gpu_power_watts", ("0",)] == 653.21
    assert found["outlast_gpu_sm_clock_hertz", ("0",)] == 1.98e9
    assert found["outlast_gpu_memory_used_bytes", ("0",)] == 71303168000
    assert found["outlast_gpu_ecc_errors_total", ("0", "corrected")] == 4
    info = ("0", "GPU-0c8a2a5e", "NVIDIA H100 80GB HBM3")
    assert found["outlast_gpu_info", info] == 1
    # A card that does not tell a value has no series of it.
    assert not [name for name, _ in found if name == "outlast_gpu_energy_joules_total"]


def test_repeated_xid_counts_twice_and_stays() -> None:
    gpus = gpu.Gpus(FakeNvml(xids=[94, 94, 48]))
    once, twice = samples(gpus.collect()), samples(gpus.collect())
    for found in (once, twice):
        assert found["outlast_gpu_xid_events_total", ("0", "94")] == 2
        assert found["outlast_gpu_xid_events_total", ("0", "48")] == 1


def test_gpu_off_the_bus_leaves_the_page_standing() -> None:
    nvml = FakeNvml(xids=[79])
    gpus = gpu.Gpus(nvml)
    nvml.is_off_the_bus = True
    found = samples(gpus.collect())
    assert found["outlast_gpu_xid_events_total", ("unknown", "79")] == 1
    assert ("outlast_gpu_power_watts", ("0",)) not in found


def test_node_without_a_gpu_has_no_gpu_series() -> None:
    assert samples(gpu.Gpus(None).collect()) == {}


def test_real_gpu_tells_its_values() -> None:
    nvml = gpu.load_nvml()
    if nvml is None:
        pytest.skip(
            "no NVML here (no GPU, or nvidia-ml-py is not installed); "
            "test_gpu_is_told_in_base_units covers the reading"
        )
    found = samples(gpu.Gpus(nvml).collect())
    assert found["outlast_gpu_memory_size_bytes", ("0",)] > 2**30
