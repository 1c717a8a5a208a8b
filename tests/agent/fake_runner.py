"""A runner of checks that finds what the suite's name says, without torch."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> int:
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    suite = arguments["--suite"]
    finding = {
        "test": "matmul",
        "node": arguments["--node"],
        "metric": "flops",
        "value": 1.5,
        "unit": "FLOP/s",
        "threshold": None,
        "verdict": "pass",
        "added_later": True,
    }
    print(json.dumps(finding), flush=True)
    if suite == "hangs":
        if os.fork() == 0:
            time.sleep(600)
        time.sleep(600)
    if suite == "rambles":
        print("it is fine", flush=True)
    if suite == "crashes":
        os.abort()
    print(json.dumps({**finding, "threshold": 1.0, "verdict": "fail"}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
