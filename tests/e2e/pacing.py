"""Runs a script that rests after each step: `python pacing.py SECONDS SCRIPT ARGUMENTS`.

A job that is to last for as long as a test needs it leaves the machine to others meanwhile.
"""

from __future__ import annotations

import builtins
import runpy
import sys
import time

_print = builtins.print


def print_and_rest(*words: object, **options: object) -> None:
    _print(*words, **options)  # type: ignore[call-overload]
    if words and str(words[0]).startswith("step "):
        time.sleep(float(SECONDS))


_, SECONDS, *sys.argv = sys.argv
builtins.print = print_and_rest
runpy.run_path(sys.argv[0], run_name="__main__")
