"""GPUs, through NVML where its Python binding and a driver are present.

XIDs are counted as events, so that a repeat is seen: they are taken out of
NVML's queue at each scrape, which holds them in between.

What does not belong here: judging them. That is `diagnostics`' business.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections import Counter as Counts
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client.core import Metric

from controller.families import Counter, Family, Gauge, Info

logger = logging.getLogger(__name__)

_BY_GPU = ("gpu",)

INFO = Info("outlast_gpu_info", "Facts about a GPU, to be joined", ("gpu", "uuid", "name"))
BUSY = Gauge("outlast_gpu_utilization_ratio", "Share of time with a kernel running", _BY_GPU)
USED = Gauge("outlast_gpu_memory_used_bytes", "Device memory in use", _BY_GPU)
SIZE = Gauge("outlast_gpu_memory_size_bytes", "Device memory", _BY_GPU)
TEMPERATURE = Gauge("outlast_gpu_temperature_celsius", "Temperature of the die", _BY_GPU)
POWER = Gauge("outlast_gpu_power_watts", "Power drawn", _BY_GPU)
ENERGY = Counter("outlast_gpu_energy_joules_total", "Energy since the driver was loaded", _BY_GPU)
CLOCK = Gauge("outlast_gpu_sm_clock_hertz", "Clock of the multiprocessors", _BY_GPU)
ECC = Counter(
    "outlast_gpu_ecc_errors_total", "Memory errors since the driver was loaded", ("gpu", "kind")
)
XIDS = Counter("outlast_gpu_xid_events_total", "XID errors since the agent began", ("gpu", "xid"))
FAMILIES: tuple[Family, ...] = (
    *(INFO, BUSY, USED, SIZE, TEMPERATURE, POWER, ENERGY, CLOCK, ECC, XIDS),
)

# At most so many events are taken out of the queue at one scrape.
_MAX_EVENTS = 1_000

# The binding has no types.
Nvml = Any


def load_nvml() -> Nvml | None:
    """NVML, initialised; None where there is no binding, no driver or no GPU."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        logger.info("no GPU metrics: %s", error)
        return None
    return nvml


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gpu:
    index: str
    uuid: str
    name: str
    handle: Any


class Gpus:
    """Reads every GPU of the node; nothing where there are none."""

    def __init__(self, nvml: Nvml | None) -> None:
        self._nvml = nvml
        self._gpus = [] if nvml is None else list(_find(nvml))
        self._events = None if nvml is None else _subscribe(nvml, self._gpus)
        # By GPU and XID.
        self._xids: Counts[tuple[str, str]] = Counts()
        # Two scrapes at once must not share out the events between them.
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """The families of this subject; none without NVML."""
        if self._nvml is not None:
            with self._lock:
                yield from self._collect(self._nvml)

    def _collect(self, nvml: Nvml) -> Iterator[Metric]:
        self._take_events(nvml)
        # From the start: a GPU that falls off the bus must not take the page with it.
        yield INFO.of((gpu.index, gpu.uuid, gpu.name) for gpu in self._gpus)
        yield self._each(BUSY, lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100)
        yield self._each(USED, lambda h: nvml.nvmlDeviceGetMemoryInfo(h).used)
        yield self._each(SIZE, lambda h: nvml.nvmlDeviceGetMemoryInfo(h).total)
        yield self._each(
            TEMPERATURE, lambda h: nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU)
        )
        yield self._each(POWER, lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1e3)
        yield self._each(ENERGY, lambda h: nvml.nvmlDeviceGetTotalEnergyConsumption(h) / 1e3)
        yield self._each(CLOCK, lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM) * 1e6)
        yield ECC.of(self._memory_errors(nvml))
        yield XIDS.of(self._xids.items())

    def _each(self, family: Gauge | Counter, read: Callable[[Any], float]) -> Metric:
        values = [((gpu.index,), self._try(read, gpu)) for gpu in self._gpus]
        return family.of((labels, value) for labels, value in values if value is not None)

    def _memory_errors(self, nvml: Nvml) -> Iterator[tuple[tuple[str, str], float]]:
        for name, kind in (
            ("corrected", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ("uncorrected", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        ):
            read = partial(_ecc_errors, nvml, kind)
            for gpu in self._gpus:
                count = self._try(read, gpu)
                if count is not None:
                    yield (gpu.index, name), count

    def _try(self, read: Callable[[Any], float], gpu: _Gpu) -> float | None:
        """A value; None where this GPU does not tell it, or does not answer any more."""
        assert self._nvml is not None
        try:
            return read(gpu.handle)
        except self._nvml.NVMLError:
            return None

    def _take_events(self, nvml: Nvml) -> None:
        if self._events is None:
            return
        for _ in range(_MAX_EVENTS):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError:
                # The queue is empty.
                return
            self._xids[_index_of(nvml, event.device), str(int(event.eventData))] += 1


def _find(nvml: Nvml) -> Iterator[_Gpu]:
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        except nvml.NVMLError as error:
            logger.warning("GPU left out of the metrics: index=%d %s", index, error)
            continue
        yield _Gpu(index=str(index), uuid=uuid, name=name, handle=handle)


def _subscribe(nvml: Nvml, gpus: list[_Gpu]) -> Any:
    """A queue of the XIDs of these GPUs; None where the driver offers none."""
    try:
        events = nvml.nvmlEventSetCreate()
        for gpu in gpus:
            nvml.nvmlDeviceRegisterEvents(gpu.handle, nvml.nvmlEventTypeXidCriticalError, events)
    except nvml.NVMLError as error:
        logger.info("XIDs are not counted: %s", error)
        return None
    return events


def _ecc_errors(nvml: Nvml, kind: int, handle: Any) -> int:
    return int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))


def _index_of(nvml: Nvml, handle: Any) -> str:
    try:
        return str(nvml.nvmlDeviceGetIndex(handle))
    except nvml.NVMLError:
        # It is off the bus, which is what its event is about.
        return "unknown"
