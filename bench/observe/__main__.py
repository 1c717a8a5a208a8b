"""What observing costs: those that train, those that are asked, and those who look.

Black boxes by event and as a share of a step; the controller's page for Prometheus with a job of
10,000 ranks; what the web page loads of such a job, and how its heat map is shown and moved in
Chromium; what a message about a job of 100,000 ranks holds the controller's loop for; and what an
agent takes to sample links. Each case is a process of its own.

    python -m bench.observe [--only boxes,fleet,pages,browser,links] [--small]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.observe import boxes, browser, fleet, links, pages
from bench.observe.claims import claims_of
from bench.results import write

CASES = ("boxes", "fleet", "pages", "browser", "links")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(CASES), help=f"some of {','.join(CASES)}")
    parser.add_argument("--small", action="store_true", help="tiny sizes: tries the program only")
    parser.add_argument("--case", choices=CASES, help="one case, in this process")
    options = parser.parse_args()
    if options.case:
        with tempfile.TemporaryDirectory(prefix="outlast-bench-") as folder:
            print(json.dumps(_case(options.case, Path(folder), small=options.small)))
        return 0
    names = options.only.split(",")
    if "browser" in names and not browser.is_there():
        parser.error("no Chromium or no playwright: run tests/web/install.sh PIP")
    for name in names:
        if name not in CASES:
            parser.error(f"--only {name!r}: allowed are {', '.join(CASES)}")
    rows = {name: _in_process(name, small=options.small) for name in names}
    # A try, or a part, must not take the place of the committed whole.
    is_whole = names == [*CASES] and not options.small
    claims = claims_of(rows)
    flat = [{"case": name, **row} for name, row in rows.items()]
    write("observe" if is_whole else "observe-part", flat, claims)
    return 0


def _case(name: str, folder: Path, *, small: bool) -> dict[str, Any]:
    match name:
        case "boxes":
            return boxes.measure(folder, small=small)
        case "fleet":
            return asyncio.run(fleet.measure(folder, small=small))
        case "pages":
            return pages.measure(folder, small=small)
        case "browser":
            return browser.measure(folder, small=small)
        case _:
            return links.measure(folder, small=small)


def _in_process(name: str, *, small: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.observe", "--case", name]
    done = subprocess.run(
        [*command, *(["--small"] if small else [])], check=True, stdout=subprocess.PIPE, text=True
    )
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(name, json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
