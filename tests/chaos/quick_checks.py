"""A runner of checks that finds every node well, at once.

Checks before a start take most of a row's time and are no subject of it. Rows that strike
while nodes are diagnosed have the real ones.
"""

from __future__ import annotations

import json
import sys


def main() -> int:
    """Answer every order from standard input, until it ends."""
    node = sys.argv[sys.argv.index("--node") + 1]
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        if order["kind"] == "host":
            print(json.dumps({"listening": 1}), flush=True)
        finding = {
            "test": "matmul",
            "node": node,
            "metric": "flops",
            "value": 1.0,
            "unit": "FLOP/s",
            "threshold": None,
            "verdict": "pass",
            "detail": "not looked at",
            "peer": order["peer"],
        }
        print(json.dumps(finding), flush=True)
        print(json.dumps({"done": True}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
