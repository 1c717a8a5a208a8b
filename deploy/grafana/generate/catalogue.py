"""All dashboards, and their JSON."""

from __future__ import annotations

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana.generate import checkpoints, fleet, job, nodes, recovery, trends

_SUBJECTS = (fleet, job, recovery, nodes, checkpoints, trends)


def documents() -> dict[str, str]:
    """The JSON of every dashboard by file name."""
    encoder = JSONEncoder(sort_keys=True, indent=2)
    built = [subject.dashboard().build() for subject in _SUBJECTS]
    for board in built:
        # Links to a panel name it by its number.
        for number, panel in enumerate(board.panels or (), start=1):
            panel.id_val = number
    return {f"{board.uid}.json": encoder.encode(board) + "\n" for board in built}
