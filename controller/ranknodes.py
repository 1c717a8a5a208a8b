"""The node of each rank in few bytes: every node of an attempt is sent all of them.

Ranks lie on nodes in blocks, and names of a fleet's nodes are alike, so that 100,000 names
take some ten thousand bytes. Without that the orders of one start would be as large as the
square of the nodes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from outlast.v1 import agents_pb2

# Of fewer ranks the names are sent as they are: anybody can read them.
MOST_PLAIN_RANKS = 1_024
# As many nodes as a controller takes, with names as long as they may be.
_MAX_BYTES = 16_384 * 254


def pack(nodes: Sequence[str]) -> bytes:
    """Nodes in the order of their ranks, of which each has as many."""
    return zlib.compress("\n".join(nodes).encode())


def rank_nodes(start: agents_pb2.StartWorkers) -> tuple[str, ...]:
    """The node of each rank that an order to start names.

    Raises:
        ValueError: they cannot be read, or are not those of so many ranks.
    """
    if not start.packed_nodes:
        return tuple(start.rank_nodes)
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(start.packed_nodes, _MAX_BYTES).decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"packed_nodes of the order cannot be read: {error}") from error
    nodes = text.split("\n")
    per_node, rest = divmod(start.world_size, len(nodes))
    if rest or not unpacker.eof:
        raise ValueError(
            f"packed_nodes of the order names {len(nodes)} nodes for {start.world_size} ranks; "
            "each must have as many"
        )
    return tuple(node for node in nodes for _ in range(per_node))
