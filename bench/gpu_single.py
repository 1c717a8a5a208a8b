"""A GPT of 1 to 7 billion parameters in bf16 on one GPU: MFU, and where the time goes.

Trains through the production loop (parallel block, recomputation as asked, fp32 weights
for the optimizer), after every fused operation and its gradients were held to its eager
twin on the device; then the same model in plain torch, eager and with torch.compile. Ours compiles
its fused operations only, so it is compared with the faster of the two. With `--save`, what a
checkpoint in host memory after each step costs, in turns with steps without. Without a GPU only
`--size toy` runs, on the CPU, to try the program.

    python -m bench.gpu_single [--size toy|400m|1b|3b|7b] [--steps 20] [--save FOLDER]
        [--plain eager|compiled|both|none]
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.baselines.single_gpu import Plain
from bench.results import Claim, write
from bench.trainer.ours import Ours
from bench.trainer.twins import check_twins
from outlast.blackbox import Phase
from outlast.devices import reported_device
from outlast.flops import Convention, flops_per_token, utilization
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec

GOAL_MFU = 0.552
WARM_UP_STEPS = 3
# Forms of the baseline, and whether torch.compile makes them.
PLAIN: Mapping[str, tuple[bool, ...]] = {
    "none": (),
    "eager": (False,),
    "compiled": (True,),
    "both": (False, True),
}

# Hidden widths as in the usual models of these sizes; 7b fits one device of 141 GB.
SIZES: Mapping[str, dict[str, Any]] = {
    "toy": {"layers": 2, "hidden": 64, "heads": 2, "seq_len": 64, "vocab_size": 256},
    "400m": {"layers": 24, "hidden": 1024, "heads": 16, "seq_len": 2048, "vocab_size": 32_768},
    "1b": {"layers": 24, "hidden": 2048, "heads": 16, "seq_len": 2048, "vocab_size": 32_768},
    "3b": {"layers": 32, "hidden": 2560, "heads": 20, "seq_len": 2048, "vocab_size": 32_768},
    "7b": {"layers": 32, "hidden": 4096, "heads": 32, "seq_len": 2048, "vocab_size": 32_768},
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument(
        "--recompute", choices=("none", "selective", "full", "offload"), default="none"
    )
    parser.add_argument(
        "--plain", choices=PLAIN, default="both", help="the baseline in plain torch"
    )
    parser.add_argument("--save", type=Path, help="folder in host memory, such as /dev/shm/bench")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and options.size != "toy":
        print("bench gpu_single: there is no GPU; only --size toy runs on a CPU", file=sys.stderr)
        return 2
    twins = check_twins(device)
    row = train(_spec(options), device, options.steps)
    row |= compare(_spec(options), device, options.steps, row, PLAIN[options.plain])
    if options.save is not None:
        row |= save(_spec(options), device, options.steps, options.save)
    row |= {"size": options.size, "twins": twins}
    print(json.dumps(row, indent=1))
    if device.type == "cuda":
        write("gpu_single", [row], _claims(row))
    return 0


def train(spec: JobSpec, device: torch.device, steps: int) -> dict[str, Any]:
    """Tokens per second, MFU by both conventions, and the split of a step's time."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as folder:
        ours = Ours(spec, folder=Path(folder), device=device)
        for number in range(WARM_UP_STEPS):
            ours.step(number)
        ours.box.new_steps()
        before, used_before = ours.box.time_use(), ours.box.step_use()
        for number in range(steps):
            ours.step(number)
        step_s = [(record.end_ns - record.start_ns) / 1e9 for record in ours.box.new_steps()]
        after, use = ours.box.time_use(), ours.box.step_use()
    return {
        "parameters": ours.num_parameters,
        **_speed(spec, device, step_s),
        "phases_s": {
            phase.name.lower(): (seconds - before.phases_s.get(phase, 0.0)) / steps
            for phase, seconds in after.phases_s.items()
        },
        # By the device's clock, where phases are the host's, which runs ahead of it.
        "passes_s": {
            "forward": (use.forward_ns - used_before.forward_ns) / steps / 1e9,
            "backward": (use.backward_ns - used_before.backward_ns) / steps / 1e9,
        },
        "peak_memory_bytes": use.peak_memory_bytes,
    }


def compare(
    spec: JobSpec,
    device: torch.device,
    steps: int,
    ours: dict[str, Any],
    forms: tuple[bool, ...],
) -> dict[str, Any]:
    """The same model in plain torch, and the speed of ours over that of its faster form.

    A form that does not fit the device has the reason instead of numbers.
    """
    plain: dict[str, dict[str, Any]] = {}
    for compiled in forms:
        name = "compiled" if compiled else "eager"
        # What ran before it must leave its memory.
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            plain[name] = _train_plain(spec, device, steps, compiled=compiled)
        except torch.OutOfMemoryError as error:
            plain[name] = {"failed": str(error).partition("\n")[0]}
    medians = [row["median_step_s"] for row in plain.values() if "failed" not in row]
    ratio = min(medians) / ours["median_step_s"] if medians else None
    return {"plain": plain, "speed_vs_plain": ratio}


def _train_plain(
    spec: JobSpec, device: torch.device, steps: int, *, compiled: bool
) -> dict[str, Any]:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    plain = Plain(spec, device=device, compiled=compiled)
    for number in range(WARM_UP_STEPS):
        plain.step(number)
    step_s = []
    for number in range(steps):
        begin_s = time.perf_counter()
        plain.step(number)
        step_s.append(time.perf_counter() - begin_s)
    on_gpu = device.type == "cuda"
    return {
        "parameters": plain.num_parameters,
        **_speed(spec, device, step_s),
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
    }


def _speed(spec: JobSpec, device: torch.device, step_s: list[float]) -> dict[str, Any]:
    """What steps of so many seconds come to, by their median."""
    median_s = statistics.median(step_s)
    tokens_per_s = spec.data.global_batch * spec.model.seq_len / median_s
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    known = reported_device(name)
    peak = None if known is None else known.peak_flops_per_s[spec.precision]
    flops = {c.value: tokens_per_s * flops_per_token(spec.model.shape, c) for c in Convention}
    return {
        "device": name if known is None else known.name,
        "step_s": step_s,
        "median_step_s": median_s,
        "tokens_per_s": tokens_per_s,
        "model_flops_per_s": flops,
        "peak_flops_per_s": peak,
        "mfu": None
        if peak is None
        else {
            name: utilization(value, devices=1, peak_flops_per_s=peak)
            for name, value in flops.items()
        },
    }


def save(spec: JobSpec, device: torch.device, steps: int, memory: Path) -> dict[str, Any]:
    """Seconds of a step with and without a save after each, and of a plain copy to the host."""
    seconds: dict[str, float] = {}
    state_bytes = 0
    # The one with saves is last: what it says of them stays.
    for name, where in (("plain_step_s", None), ("saved_step_s", memory)):
        with tempfile.TemporaryDirectory(prefix="outlast-bench-") as folder:
            ours = Ours(spec, folder=Path(folder), device=device, memory=where)
            for number in range(WARM_UP_STEPS):
                ours.step(number)
            before = ours.box.time_use()
            begin_s = time.perf_counter()
            for number in range(steps):
                ours.step(number)
            if ours.stager is not None:
                ours.stager.finish()
            seconds[name] = (time.perf_counter() - begin_s) / steps
            # By the host's clock; what goes on beside the next step is not in it.
            in_save_s = ours.box.time_use().phases_s[Phase.CHECKPOINT]
            seconds["in_save_s"] = (in_save_s - before.phases_s[Phase.CHECKPOINT]) / steps
            if ours.stager is not None:
                ours.stager.close()
            state_bytes = ours.state_bytes
    shutil.rmtree(memory)
    copied_bytes = min(state_bytes, 1 << 30)
    return {
        "state_bytes": state_bytes,
        **seconds,
        "saved_vs_plain": seconds["saved_step_s"] / seconds["plain_step_s"],
        "copy_s": _copy_s(device, copied_bytes) * state_bytes / copied_bytes,
    }


def _copy_s(device: torch.device, num_bytes: int) -> float:
    """Seconds to copy so much from the device into memory that was pinned before."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    into = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    found = []
    for _ in range(5):
        begin_s = time.perf_counter()
        into.copy_(source)
        found.append(time.perf_counter() - begin_s)
    return statistics.median(found)


def _spec(options: argparse.Namespace) -> JobSpec:
    return parse_spec(
        {
            "name": "bench-gpu-single",
            "steps": 100_000,
            "precision": "bf16",
            "determinism": "fast",
            "model": {
                **SIZES[options.size],
                "block": "parallel",
                "tied_embeddings": False,
                "positions": "rope",
                "attention_bias": False,
                "mlp_bias": False,
            },
            "parallel": {"micro_batch": options.micro_batch, "recompute": options.recompute},
            "data": {
                "global_batch": options.micro_batch * options.micro_batches,
                "max_bytes": 2**22,
            },
            "eval": {"interval_steps": None},
        }
    )


def _claims(row: dict[str, Any]) -> list[Claim]:
    where = f"{row['size']} on one {row['device']}"
    claims = []
    if row["mfu"] is not None:
        claims.append(
            Claim(
                claim="gpu_mfu",
                value=row["mfu"]["full"],
                unit="share of the bf16 peak",
                goal=f">= {GOAL_MFU}",
                baseline="MegaScale (NSDI '24), 12,288 GPUs: 55.2 %",
                how=f"{where}, full-attention convention, median step",
            )
        )
    if row["speed_vs_plain"] is not None:
        forms = " and ".join(name for name, one in row["plain"].items() if "failed" not in one)
        claims.append(
            Claim(
                claim="gpu_speed_vs_plain_torch",
                value=row["speed_vs_plain"],
                unit="x",
                goal=">= 1",
                baseline=f"the same model in plain torch, the fastest of: {forms}",
                how=f"{where}, median steps, the baseline after ours",
            )
        )
    return claims


if __name__ == "__main__":
    sys.exit(main())
