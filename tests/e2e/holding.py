"""Runs a script that waits at a known moment: `python holding.py STEP FILE SCRIPT ARGUMENTS`.

In the first attempt the rank that has printed the loss of this step waits until the file is there.
"""

from __future__ import annotations

import builtins
import os
import runpy
import sys
import time

_print = builtins.print


def print_and_wait(*words: object, **options: object) -> None:
    _print(*words, **options)  # type: ignore[call-overload]
    if words and str(words[0]).startswith(f"step {STEP} loss "):
        while not os.path.exists(FILE):
            time.sleep(0.01)


_, STEP, FILE, *sys.argv = sys.argv
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    builtins.print = print_and_wait
runpy.run_path(sys.argv[0], run_name="__main__")
