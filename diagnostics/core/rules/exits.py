"""The table of messages at the end of a worker; `diagnostics.core.exits` applies it.

Some samples of gloo, TCPStore and torch were taken from real runs of torch 2.13; those of
NCCL, CUDA and the kernel follow public reports and were not captured here.
"""

from __future__ import annotations

from diagnostics.core.rules.exits_node import NODE
from diagnostics.core.rules.exits_numbers import NUMBERS
from diagnostics.core.rules.exits_peers import PEERS
from diagnostics.core.rules.exits_program import PROGRAM
from diagnostics.core.rules.table import Table

EXITS = Table(name="exits", version=6, rules=(*NODE, *NUMBERS, *PEERS, *PROGRAM))
