"""A script with a session under plain Python: nothing happens, and nothing is needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from outlast import session


def test_every_call_does_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    model = torch.nn.Linear(1, 1)
    checkpoint = session.checkpoint(model=model)
    assert checkpoint.restore() == 0
    session.step(1, loss=1.0)
    checkpoint.save(1)
    with session.box("data"):
        assert not session.should_stop()
    assert not session.is_active()
    assert signal.getsignal(signal.SIGTERM) is before
    assert "OUTLAST_SESSION_FILE" not in os.environ


def test_an_object_without_a_state_is_refused_there_too() -> None:
    with pytest.raises(TypeError, match=r"loader=\.\.\.\) is a list, which has no state_dict and"):
        session.checkpoint(loader=[1])
    with pytest.raises(TypeError, match="the session saves it by itself"):
        session.checkpoint(random=torch.nn.Linear(1, 1))


def test_what_only_sharded_tensors_need_is_not_imported_for_others() -> None:
    program = (
        "import sys, torch, torch.distributed\n"
        "import outlast.session.checkpoints, outlast.session.objects\n"
        "from outlast.session.shards import sharding_of\n"
        "assert sharding_of(torch.ones(1)) is None\n"
        "sys.exit('sympy' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
