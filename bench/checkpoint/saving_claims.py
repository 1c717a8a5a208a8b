"""What the figures of `saving.py` claim."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from bench.checkpoint.gpt import Size
from bench.checkpoint.options import quartiles, ratio
from bench.checkpoint.training import BYTES_PER_S
from bench.results import Claim

DCP = ("dcp_thread", "dcp_process")
# Raw writes to disk by one thread and by as many as an upload has.
RAW_THREADS = (1, 4)


def claims_of(size: Size, row: dict[str, Any]) -> list[Claim]:
    """The claims at one size; those at larger sizes have it in their names."""
    suffix = "" if not size.is_large else f"_{size.name.replace(' ', '').lower()}"
    how = f"GPT state of {row['nbytes'] / 1e9:.2f} GB, one rank; medians of paired rounds"
    found = [*_stall(row, how), *_others_to_stall(row, how), _durable(row, how)]
    found += _lost(row, how)
    if "training" in row:
        found.append(_training(row, how))
    return [replace(claim, claim=claim.claim + suffix) for claim in found]


def _stall(row: dict[str, Any], how: str) -> list[Claim]:
    return [
        Claim(
            claim="stall_vs_memcpy",
            value=_to_plain(row, "ours"),
            unit="x",
            goal="<= 1.05",
            baseline="memmove of the same tensors into memory that is there already",
            how=f"{how}; no core is free for the copy; {_quartiles(row, 'ours')}",
        ),
        Claim(
            claim="stall_vs_memcpy_spare_core",
            value=_to_plain(row, "ours_beside"),
            unit="x",
            goal="reported",
            baseline="memmove of the same tensors into memory that is there already",
            how=f"{how}; the copy goes on beside the next step; {_quartiles(row, 'ours_beside')}",
        ),
        Claim(
            claim="checksum_delay",
            value=statistics.median(row["checksum_delay_s"]),
            unit="s",
            goal="reported",
            baseline="none: damage to a slot is found from then on",
            how=f"{how}; from the seal until the agent has stored the checksums of the slot",
        ),
    ]


def _others_to_stall(row: dict[str, Any], how: str) -> list[Claim]:
    """How much longer others wait than we do."""
    stall, beside = _to_plain(row, "ours"), _to_plain(row, "ours_beside")
    torch_save = _to_plain(row, "torch_save")
    best = min(DCP, key=lambda name: _to_plain(row, name))
    return [
        Claim(
            claim="torch_save_vs_stall",
            value=torch_save / stall,
            unit="x",
            goal=">= 8",
            baseline="torch.save to local disk, fsync, rename",
            how=f"{how}; no core is free for the copy",
        ),
        Claim(
            claim="torch_save_vs_stall_spare_core",
            value=torch_save / beside,
            unit="x",
            goal="reported",
            baseline="torch.save to local disk, fsync, rename",
            how=f"{how}; the copy goes on beside the next step",
        ),
        Claim(
            claim="dcp_async_vs_stall",
            value=_to_plain(row, best) / stall,
            unit="x",
            goal=">= 1",
            baseline=f"async_save with kept staging buffers, the faster mode: {best}",
            how=how,
        ),
    ]


def _to_plain(row: dict[str, Any], name: str) -> float:
    """How much longer a rank waits than for a plain copy made in the same rounds."""
    group = next(group for group in row["blocked_s"] if name in group)
    return ratio(group[name], group["plain"])


def _quartiles(row: dict[str, Any], name: str) -> str:
    """How far pairs differ from each other."""
    group = next(group for group in row["blocked_s"] if name in group)
    low, middle, high = quartiles(group[name], group["plain"])
    pairs = len(group["plain"])
    return f"quartiles of {pairs} pairs in random order {low:.2f}, {middle:.2f}, {high:.2f}"


def _durable(row: dict[str, Any], how: str) -> Claim:
    found = row["durable_s"]
    raw = (f"raw_{threads}" for threads in RAW_THREADS)
    best = min(raw, key=lambda name: statistics.median(found[name]))
    return Claim(
        claim="durable_vs_raw_store",
        value=ratio(found[best], found["ours"]),
        unit="x",
        goal=">= 0.8",
        baseline=f"the slot's bytes written with O_DIRECT and flushed, by 1 or 4 threads: {best}",
        how=f"{how}; from the seal until the agent knows that the checkpoint exists; local disk",
    )


def _lost(row: dict[str, Any], how: str) -> list[Claim]:
    return [_lost_in(name, found, how) for name, found in row["lost_steps"].items()]


def _lost_in(loop: str, found: dict[str, list[float]], how: str) -> Claim:
    # Of one save the noise of a shared machine can be more than the loss.
    loss = {name: statistics.median(steps) for name, steps in found.items()}
    best = min(DCP, key=lambda name: loss[name])
    beside = {
        "launching": "a loop that issues small operations from Python, as for a device",
        "computing": "matrix products on every core",
    }[loop]
    return Claim(
        claim="net_loss_vs_best_dcp" if loop == "launching" else f"net_loss_vs_best_dcp_{loop}",
        value=loss["ours"] / loss[best],
        unit="x",
        goal="<= 0.34",
        baseline=f"async_save with kept staging buffers, the mode that loses less: {best}",
        how=f"{how}; steps of {beside} lost until the state is durable on local disk",
    )


def _training(row: dict[str, Any], how: str) -> Claim:
    found = row["training"]
    return Claim(
        claim="step_slowdown_during_upload",
        value=ratio(found["during"], found["without"]),
        unit="x",
        goal="<= 1.05",
        baseline="steps before and after the upload",
        how=f"{how}; the trainer's own steps on one core, one core to spare, a budget of "
        f"{BYTES_PER_S / 1e6:.0f} MB/s",
    )
