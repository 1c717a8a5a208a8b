"""From the signal to the next completed step: Outlast beside what others do after it.

Same model, ranks and machine, interleaved in one run: a SIGKILL of one of two ranks under
Outlast, under `torchrun --max-restarts`, and under NVIDIA's restart inside the process where
`nvidia-resiliency-ext` is installed; then a SIGSTOP under Outlast; then torchrun's own script
under Outlast, as it is and with `outlast.session`. torchrun is set to its best:
`--monitor-interval 0.1`, a checkpoint on tmpfs every step, and
`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`. The time runs from the signal until *every* rank has
completed a step of the next attempt. Beside the parts of ours stands the least that
each can take here (`floors.py`).

    python -m bench.recovery [--runs 5]
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.recovery.floors import measure
from bench.recovery.launched import in_process, kill, torchrun
from bench.recovery.ours import controller, strike
from bench.recovery.report import report
from bench.recovery.scripts import strike_script
from bench.recovery.setting import SPEC
from outlast.spec.parse import parse_spec

# An unmodified script, which says nothing of its steps, and the same with a session.
_SCRIPTS = (
    ("run", signal.SIGKILL),
    ("session", signal.SIGKILL),
    ("session", signal.SIGSTOP),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    # Whoever ends this ends all that it has started, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    spec = parse_spec(SPEC)
    others = [torchrun()]
    if find_spec("nvidia_resiliency_ext") is None:
        print("nvidia-resiliency-ext is not installed: left out")
    else:
        others += [in_process(fastest=True), in_process(fastest=False)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        folder = Path(name)
        state_dir = folder / "state"
        with controller(state_dir) as client:
            for run in range(runs):
                killed = strike(client, state_dir, 2 * run, signal.SIGKILL)
                floor_s = {**measure(killed["state_bytes"]), "first_step": killed["step_s"]}
                found = [{**killed, "floor_s": floor_s}]
                found += [kill(other, spec, folder / f"{other.name}-{run}") for other in others]
                found += [strike(client, state_dir, 2 * run + 1, signal.SIGSTOP)]
                found += [
                    strike_script(client, kind, spec, folder / f"{kind}-{how.name}-{run}", how)
                    for kind, how in _SCRIPTS
                ]
                for row in found:
                    print(
                        f"run {run}: {row['launcher']} {row['signal']} "
                        f"{row['recovery_s']:.3f} s  {row['split_s']}",
                        flush=True,
                    )
                rows += [{"run": run, **row} for row in found]
    report(rows, _session_cost())


def _session_cost() -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.recovery.session_cost"]
    with tempfile.TemporaryDirectory(prefix="outlast-bench-", dir="/dev/shm") as memory:
        done = subprocess.run([*command, memory], check=True, stdout=subprocess.PIPE, text=True)
    print(f"a session's cost: {done.stdout.strip()}", flush=True)
    cost: dict[str, Any] = json.loads(done.stdout)
    return cost


if __name__ == "__main__":
    main()
