"""Counters and tools of hardware that this machine does not have.

`ib_write_bw-no-device.txt` is recorded output. The rest is written by hand after
the tools' documentation, since no such device was at hand.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diagnostics.checks import gpu, inventory, rdma
from diagnostics.checks.base import SkipCheckError
from diagnostics.core.baseline import Baseline
from diagnostics.core.counters import Snapshot, risen
from diagnostics.core.finding import CheckVerdict, Finding
from diagnostics.core.nvidia import GpuState, gpus_in, xids_in
from diagnostics.core.perftest import NoDeviceError, average_gbit_per_s
from diagnostics.core.verdicts import judge
from tests.diagnostics.test_checks import collect, context

RECORDED = Path(__file__).parent / "recorded"
HEALTHY = GpuState(
    index=0,
    name="NVIDIA H200",
    uuid="GPU-1",
    uncorrectable_errors=0,
    is_remap_pending=False,
    has_remap_failed=False,
    slowdowns=(),
)
# By hand, after `nvidia-smi -q -x`; see the module.
SMI = """<?xml version="1.0" ?>
<nvidia_smi_log>
  <gpu id="00000000:19:00.0">
    <product_name>NVIDIA H200</product_name>
    <uuid>GPU-1</uuid>
    <ecc_errors>
      <volatile>
        <sram_correctable>4</sram_correctable>
        <sram_uncorrectable_parity>1</sram_uncorrectable_parity>
        <dram_uncorrectable>2</dram_uncorrectable>
      </volatile>
      <aggregate><dram_uncorrectable>9</dram_uncorrectable></aggregate>
    </ecc_errors>
    <remapped_rows>
      <remapped_row_pending>Yes</remapped_row_pending>
      <remapped_row_failure>No</remapped_row_failure>
    </remapped_rows>
    <clocks_event_reasons>
      <clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
      <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
      <clocks_event_reason_hw_thermal_slowdown>Active</clocks_event_reason_hw_thermal_slowdown>
    </clocks_event_reasons>
  </gpu>
  <gpu id="00000000:3B:00.0">
    <product_name>NVIDIA GeForce</product_name>
    <ecc_errors><volatile><dram_uncorrectable>N/A</dram_uncorrectable></volatile></ecc_errors>
  </gpu>
</nvidia_smi_log>
"""
BANDWIDTH = """
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 8388608    2000             392.15             391.88              0.005839
---------------------------------------------------------------------------------------
"""


def test_perftest_without_a_device_is_no_result() -> None:
    with pytest.raises(NoDeviceError):
        average_gbit_per_s((RECORDED / "ib_write_bw-no-device.txt").read_text())


def test_perftest_rows_are_read_and_anything_else_is_refused() -> None:
    assert average_gbit_per_s(BANDWIDTH) == 391.88
    with pytest.raises(ValueError, match="Couldn't connect"):
        average_gbit_per_s("waiting\nCouldn't connect to 127.0.0.1:18515\n")


@pytest.mark.skipif(
    bool(list(Path("/sys/class/infiniband").glob("*"))), reason="this machine has RDMA devices"
)
def test_rdma_is_skipped_with_its_reason() -> None:
    with pytest.raises(SkipCheckError, match="no RDMA device"):
        rdma.run(context(), lambda item: None)


def test_gpu_is_skipped_where_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SkipCheckError, match="nvidia-smi is not installed"):
        gpu.run(context(), lambda item: None)


def test_what_the_driver_says_is_read() -> None:
    first, second = gpus_in(SMI)
    assert first == replace(
        HEALTHY,
        uncorrectable_errors=3,
        is_remap_pending=True,
        slowdowns=("hw_thermal_slowdown",),
    )
    assert (second.index, second.uncorrectable_errors, second.slowdowns) == (1, 0, ())
    with pytest.raises(ValueError, match="did not print XML"):
        gpus_in("NVIDIA-SMI has failed")


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, CheckVerdict.PASS),
        ({"uncorrectable_errors": 1}, CheckVerdict.FAIL),
        ({"has_remap_failed": True}, CheckVerdict.FAIL),
        ({"slowdowns": ("hw_slowdown",)}, CheckVerdict.FAIL),
        ({"is_remap_pending": True}, CheckVerdict.WARN),
    ],
)
def test_states_of_devices_are_judged(change: dict[str, object], verdict: CheckVerdict) -> None:
    state = replace(HEALTHY, **change)  # type: ignore[arg-type]  # field values of any type
    findings = [judge(item, Baseline(), "n0") for item in gpu.measurements((state,), 0.1)]
    assert _worst(findings) is verdict


def test_a_driver_without_devices_fails() -> None:
    findings = [judge(item, Baseline(), "n0") for item in gpu.measurements((), 0.1)]
    assert _worst(findings) is CheckVerdict.FAIL


def test_errors_that_speak_against_a_device_are_found_in_the_kernels_log() -> None:
    log = """6,1,1,-;NVRM: Xid (PCI:0000:19:00): 79, pid=1234, GPU has fallen off the bus.
6,2,2,-;NVRM: Xid (PCI:0000:19:00): 31, pid=77, name=python, MMU Fault
6,3,3,-;NVRM: Xid (PCI:0000:3b:00): 95, pid='<unknown>', Uncontained memory error
6,4,4,-;NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.
6,5,5,-;NVRM: Xid (PCI:0000:3b:00): 92, High single-bit ECC error rate
6,6,6,-;usb 1-1: new device"""
    assert list(xids_in(log)) == [("0000:19:00", 79), ("0000:3b:00", 95), ("unknown", 79)]


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with a port of each kind, as `/proc` and `/sys` describe it."""
    root = tmp_path / "root"
    write(root, "proc/meminfo", "MemTotal:       24682716 kB\nMemFree: 1 kB")
    write(root, "proc/sys/kernel/osrelease", "6.1.0")
    write(root, "proc/sys/kernel/random/boot_id", "boot-1")
    write(root, "sys/devices/system/edac/mc/mc0/ce_count", "2")
    write(root, "sys/devices/system/edac/mc/mc0/ue_count", "0")
    write(root, "sys/class/net/eth0/statistics/rx_errors", "5")
    write(root, "sys/class/net/eth0/carrier_down_count", "1")
    write(root, "sys/class/net/lo/statistics/rx_errors", "5")
    write(root, "sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
    write(root, "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed", "0")
    write(root, "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error", "7")
    return root


def look(machine: Path) -> dict[str, Finding]:
    """The findings of one inventory."""
    where = context(counters_file=machine.parent / "counters.json")
    found = collect(lambda context, emit: inventory.run(context, emit, root=machine), where)
    return {item.metric: judge(item, Baseline(), "n0") for item in found.values()}


def test_a_first_look_only_remembers(machine: Path) -> None:
    found = look(machine)
    assert {item.verdict for item in found.values()} == {CheckVerdict.PASS}
    assert found["memory"].value == pytest.approx(23.54, abs=0.01)
    assert found["counters_at_rest"].value == 6
    assert found["mlx5_0.1.down"].value == 0


def test_what_has_risen_since_the_last_look_warns(machine: Path) -> None:
    look(machine)
    write(machine, "sys/class/net/eth0/carrier_down_count", "3")
    write(machine, "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed", "1")
    # Within what a healthy port may show.
    write(machine, "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error", "60")
    found = look(machine)
    warned = [name for name, item in found.items() if item.verdict is CheckVerdict.WARN]
    assert warned == ["net.eth0.carrier_down_count.rise", "rdma.mlx5_0.1.link_downed.rise"]
    assert found["net.eth0.carrier_down_count.rise"].value == 2
    assert found["rdma.mlx5_0.1.symbol_error.rise"].verdict is CheckVerdict.PASS
    assert {item.verdict for item in look(machine).values()} == {CheckVerdict.PASS}


def test_a_port_without_a_cable_is_no_fault_and_one_that_lost_it_is(machine: Path) -> None:
    write(machine, "sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN")
    for _ in range(2):
        second = look(machine)["mlx5_1.1.down"]
        assert second.verdict is CheckVerdict.WARN
        assert "never seen active" in second.detail
    write(machine, "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    write(machine, "proc/sys/kernel/random/boot_id", "boot-2")
    for _ in range(2):
        assert look(machine)["mlx5_0.1.down"].verdict is CheckVerdict.FAIL


def test_a_dead_port_and_a_lost_bit_of_memory_fail(machine: Path) -> None:
    look(machine)
    write(machine, "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    write(machine, "sys/devices/system/edac/mc/mc0/ue_count", "1")
    found = look(machine)
    failed = [name for name, item in found.items() if item.verdict is CheckVerdict.FAIL]
    assert failed == ["mlx5_0.1.down", "edac.mc0.ue_count"]


def test_counters_of_another_boot_are_no_comparison() -> None:
    before = Snapshot(boot_id="a", at_s=1.0, counters={"x": 9})
    assert risen(before, Snapshot(boot_id="b", at_s=2.0, counters={"x": 10}), "x") is None
    assert risen(before, Snapshot(boot_id="a", at_s=2.0, counters={"x": 10}), "x") == 1
    assert risen(before, Snapshot(boot_id="a", at_s=2.0, counters={"x": 0}), "x") is None
    assert Snapshot.from_json(before.to_json()) == before
    with pytest.raises(ValueError, match="not a counters file"):
        Snapshot.from_json("{}")


def _worst(findings: list[Finding]) -> CheckVerdict:
    order = (CheckVerdict.FAIL, CheckVerdict.WARN, CheckVerdict.PASS)
    return min((finding.verdict for finding in findings), key=order.index)
