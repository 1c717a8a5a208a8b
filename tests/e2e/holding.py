"""Runs a script that waits at a known moment: `python holding.py STEP FILE SCRIPT ARGUMENTS`.

In the first attempt the rank that has printed the loss of this step waits until the file is there.
If it has a session, it says when it is asked to stop there.
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
        has_said = False
        while not os.path.exists(FILE):
            if is_asked_to_stop() and not has_said:
                has_said = True
                _print("asked to stop", flush=True)
            time.sleep(0.01)


def is_asked_to_stop() -> bool:
    # A script without a session is not to get one by this.
    if "outlast.session" not in sys.modules:
        return False
    from outlast.session.process import current

    session = current()
    return session is not None and session.is_asked_to_stop


_, STEP, FILE, *sys.argv = sys.argv
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    builtins.print = print_and_wait
runpy.run_path(sys.argv[0], run_name="__main__")
