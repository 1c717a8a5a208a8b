"""How long each phase of a recovery takes, as published or measured, each with its source.

A simulation that made a phase free would prove whatever one likes, so a duration of zero is
refused. Where only a mean and a maximum are published, draws follow an exponential tail from
the minimum, cut at the maximum; where only bounds are, they are uniform.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from controller.sim.pace import Pace


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """A distribution of seconds. Without a mean, every value between the bounds is as likely."""

    what: str
    least_s: float
    most_s: float
    mean_s: float | None = None
    source: str

    def __post_init__(self) -> None:
        if not 0.0 < self.least_s <= self.most_s:
            raise ValueError(
                f"{self.what}: a duration must lie above zero and its least below its most, "
                f"not {self.least_s:g}..{self.most_s:g} s: nothing in a recovery is free"
            )
        if self.mean_s is not None and not self.least_s <= self.mean_s <= self.most_s:
            raise ValueError(f"{self.what}: the mean {self.mean_s:g} s is not between its bounds")

    @property
    def expected_s(self) -> float:
        """The mean, as published."""
        return (self.least_s + self.most_s) / 2 if self.mean_s is None else self.mean_s

    def draw(self, random: Random) -> float:
        if self.mean_s is None or self.mean_s == self.least_s:
            return random.uniform(self.least_s, self.most_s)
        tail_s = random.expovariate(1.0 / (self.mean_s - self.least_s))
        return min(self.most_s, self.least_s + tail_s)

    def times(self, factor: float) -> Duration:
        """The same shape, `factor` times as long.

        Raises:
            ValueError: the factor is zero or less.
        """
        mean_s = None if self.mean_s is None else self.mean_s * factor
        return replace(
            self, least_s=self.least_s * factor, most_s=self.most_s * factor, mean_s=mean_s
        )


# Full restarts of jobs by number of GPUs: what NCCL takes to start (FT-HSDP, table of restarts).
_NCCL_START_S = ((16_384, 17.0), (22_528, 30.0), (65_536, 100.0), (98_304, 200.0))


def nccl_start(num_gpus: int) -> Duration:
    """What communicators take to form; below the smallest known scale, in proportion."""
    first_gpus, first_s = _NCCL_START_S[0]
    mean_s = first_s * num_gpus / first_gpus
    for (low, low_s), (high, high_s) in pairwise(_NCCL_START_S):
        if num_gpus > low:
            mean_s = low_s + (high_s - low_s) * (num_gpus - low) / (high - low)
    return Duration(
        what="communicators form (NCCL), by number of GPUs",
        least_s=0.8 * mean_s,
        most_s=1.2 * mean_s,
        source="FT-HSDP: 17/30/100/200 s at 16K/22K/64K/98K GPUs; in between in proportion, "
        "+-20 % from start to start is ours",
    )


def judging(num_gpus: int) -> Duration:
    """What it takes to find out who holds up a job of so many ranks."""
    extra_s = 2.0 * num_gpus / 100_000
    return Duration(
        what="who holds up a job that hangs is worked out, by number of GPUs",
        least_s=0.010 + extra_s,
        most_s=0.013 + extra_s,
        source="measured: 0.010 to 0.013 s of few ranks, 2 s of 100,000; in between in proportion",
    )


def durations_for(num_gpus: int) -> dict[str, Duration]:
    """All durations of a job of this many GPUs, by the name that users set them with."""
    return {**_FIXED, "judge": judging(num_gpus), "nccl": nccl_start(num_gpus)}


_FIXED = {
    "detect_process": Duration(
        what="a process that died is noticed",
        least_s=0.01,
        mean_s=0.03,
        most_s=2.0,
        source="measured: pidfd 0.025 s; kernel faults within 2 s (ByteRobust, inspection)",
    ),
    "detect_gpu": Duration(
        what="a GPU that hangs, is lost or too hot is noticed",
        least_s=0.1,
        most_s=10.0,
        source="ByteRobust: inspected every 10 s",
    ),
    "detect_network": Duration(
        what="a NIC that crashed or a port that flaps is noticed",
        least_s=0.1,
        most_s=30.0,
        source="ByteRobust: inspected every 30 s",
    ),
    "detect_hang": Duration(
        what="a hang is noticed",
        least_s=12.0,
        most_s=30.0,
        source="Unicron: 3 x the mean iteration; iterations of 4 to 10 s (Llama 3 405B: about 6 s)",
    ),
    "detect_sdc": Duration(
        what="silent corruption shows as NaN and is traced; all work since is lost",
        least_s=60.0,
        mean_s=4289.0,
        most_s=7200.0,
        source="ByteRobust, table of localisation to restart: NaN 4,289 s (at most 7,200)",
    ),
    "stop": Duration(
        what="workers of a node are killed",
        least_s=0.06,
        mean_s=0.083,
        most_s=2.0,
        source="measured: warm respawn, stop 0.06 to 0.083 s; the tail of 2 s is ours",
    ),
    "diagnose": Duration(
        what="nodes and links are checked after a fault",
        least_s=10.0,
        mean_s=93.0,
        most_s=600.0,
        source="ByteRobust, localisation to restart: CUDA 93 s (at most 600), GPU memory 10 s",
    ),
    "preflight": Duration(
        what="a replacement is checked before use",
        least_s=5.0,
        mean_s=30.0,
        most_s=120.0,
        source="DCGM user guide: run level 1 takes seconds, level 2 about 2 minutes",
    ),
    "provision": Duration(
        what="the cluster brings a new node",
        least_s=454.0,
        most_s=768.0,
        source="ByteRobust: requeue 454 to 768 s at 2,048 to 16,384 GPUs",
    ),
    "process": Duration(
        what="worker processes start",
        least_s=2.60,
        mean_s=2.96,
        most_s=3.62,
        source="measured: a cold start with torch's imports. Ours fork from a warm process in "
        "0.006 to 0.017 s; the rest stands for the CUDA context, which a fork pays",
    ),
    "restore_memory": Duration(
        what="state goes from host memory to the devices",
        least_s=0.34,
        mean_s=0.59,
        most_s=5.0,
        source="ByteCheckpoint: the same bytes the other way stall 0.34 to 0.59 s; 'several "
        "seconds' (MegaScale)",
    ),
    "restore_storage": Duration(
        what="state is loaded from storage",
        least_s=65.0,
        mean_s=129.5,
        most_s=260.0,
        source="ByteCheckpoint: 405B on 8,960 GPUs loads in 129.49 s; half and twice are ours",
    ),
    "upload": Duration(
        what="a checkpoint is stored",
        least_s=25.0,
        mean_s=51.1,
        most_s=102.0,
        source="ByteCheckpoint: 405B on 8,960 GPUs saves in 51.06 s; half and twice are ours",
    ),
    "checkpoint_stall": Duration(
        what="a step waits for its copy to host memory",
        least_s=0.01,
        most_s=0.04,
        source="ByteRobust: 0.01 to 0.04 s, every step",
    ),
}


def with_changes(
    durations: Mapping[str, Duration], means_s: Mapping[str, float]
) -> dict[str, Duration]:
    """The durations, some of them scaled to another mean.

    Raises:
        ValueError: no such duration, or a mean of zero or less.
    """
    changed = dict(durations)
    for name, mean_s in means_s.items():
        if name not in changed:
            raise ValueError(f"no duration is called {name!r}; there are {', '.join(changed)}")
        if mean_s <= 0.0:
            raise ValueError(
                f"{name}={mean_s:g}: a duration must be above zero: nothing in a recovery is free"
            )
        changed[name] = changed[name].times(mean_s / changed[name].expected_s)
    return changed


class SourcedPace(Pace):
    """The pace of the durations.

    Each has a stream of its own, so that a change of one leaves the draws of the others as
    they were, and two runs can be compared.
    """

    def __init__(self, seed: int, durations: Mapping[str, Duration]) -> None:
        super().__init__(Random(f"pace {seed}"))
        self._durations = durations
        self._streams = {name: Random(f"{name} {seed}") for name in durations}

    def draw(self, name: str) -> float:
        return self._durations[name].draw(self._streams[name])

    def fork_s(self) -> float:
        return self.draw("process")

    def stop_s(self) -> float:
        return self.draw("stop")

    def judge_s(self) -> float:
        return self.draw("judge")

    def suite_s(self) -> float:
        return self.draw("preflight")

    def search_s(self) -> float:
        return self.draw("diagnose")

    def provision_s(self) -> float:
        return self.draw("provision")

    def restore_s(self, usual_s: float, *, from_memory: bool) -> float:
        state = "restore_memory" if from_memory else "restore_storage"
        return self.draw("nccl") + self.draw(state)

    def upload_s(self, usual_s: float) -> float:
        return self.draw("upload")
