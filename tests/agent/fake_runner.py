"""A runner of checks that finds what the suite's name says, without torch."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> int:
    node = sys.argv[sys.argv.index("--node") + 1]
    for line in iter(sys.stdin.readline, ""):
        carry_out(json.loads(line), node)
        print(json.dumps({"done": True}), flush=True)
    return 0


def carry_out(order: dict[str, str], node: str) -> None:
    suite = order["suite"]
    finding = {
        "test": "matmul",
        "node": node,
        "metric": "flops",
        "value": 1.5,
        "unit": "FLOP/s",
        "threshold": None,
        "verdict": "pass",
        "detail": f"pid {os.getpid()}",
        "peer": order["peer"],
        "added_later": True,
    }
    if order["kind"] == "host":
        print(json.dumps({"listening": 4242}), flush=True)
    print(json.dumps(finding), flush=True)
    if suite == "hangs":
        if os.fork() == 0:
            time.sleep(600)
        time.sleep(600)
    if suite == "stands":
        time.sleep(600)
    if suite == "rambles":
        print("it is fine", flush=True)
    if suite == "crashes":
        os.abort()
    print(json.dumps({**finding, "threshold": 1.0, "verdict": "fail"}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
