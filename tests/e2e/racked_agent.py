"""An agent of a local node that says in which rack it stands: two nodes to a rack."""

from __future__ import annotations

import sys

from controller.agent.__main__ import main

if __name__ == "__main__":
    node = sys.argv[sys.argv.index("--node") + 1]
    rack = int(node.removeprefix("node-")) // 2
    sys.exit(main([*sys.argv[1:], "--topology", f"block/rack-{rack}"]))
