"""Places in a layout, as far as data looks at them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch

from outlast.blackbox import Group
from trainer.parallel.comm import Comm
from trainer.parallel.mesh import Mesh


def place_of(replica: int = 0, *, is_first_stage: bool = True, has_loss: bool = True) -> Mesh:
    """That of a rank which reads all of the sequences of a replica."""
    place = SimpleNamespace(
        replica=replica,
        cp=Comm(group=Group.CP, ranks=(0,), index=0),
        device=torch.device("cpu"),
        is_first_stage=is_first_stage,
        has_loss=has_loss,
    )
    return cast(Mesh, place)
