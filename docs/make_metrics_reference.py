"""Write the reference page of metrics from their declarations, so that it cannot drift.

`python docs/make_metrics_reference.py` rewrites docs/reference/metrics.md; a test
compares it with what the code says now.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from controller.agent.observe.metrics import gpu, host, network, ranks
from controller.agent.observe.metrics import itself as agent
from controller.families import Family
from controller.kube import metrics as kube
from controller.notify import metrics as notifications
from controller.otlp import metrics as otlp
from controller.web.metrics import checkpoints, checks, fleet, incidents, jobs, training, trends
from controller.web.metrics import itself as controller

PAGE = Path(__file__).parent / "reference" / "metrics.md"

_HEAD = """# Metrics

Generated from the declarations below `controller/web/metrics` and
`controller/agent/observe/metrics` and in `metrics.py` of `controller/kube`,
`controller/notify` and `controller/otlp` by `python docs/make_metrics_reference.py`.

The controller shows jobs, nodes, incidents and checkpoints at `http://CONTROLLER:7071/metrics`.
Each agent shows its ranks and its machine at the port of `--metrics-port`;
`http://CONTROLLER:7071/sd/agents` tells a Prometheus where they are, each with the label `node`.
All speak the text format of Prometheus, and OpenMetrics.

Conventions:

- Base units, and names that say them. Counters end with `_total`, facts to be joined with `_info`.
- States are one series per state, of which one is 1.
- Labels are a job, a node, a device, or a word of a closed set. Ranks are on the agents' pages
  only, and never on a histogram. The series of a job disappear an hour after its end.
- Incidents, lost seconds and restarts come from the journal and survive the controller. Counters of
  what agents report (steps, goodput, uploads, findings) begin at zero with each controller, as
  `rate` and `increase` expect.
- Rules and dashboards on top of these are in `deploy/prometheus` and `deploy/grafana`.
"""


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            _HEAD,
            "## Controller\n",
            *_sections(
                ("Jobs", jobs),
                ("Training", training),
                ("Checkpoints", checkpoints),
                ("Incidents", incidents),
                ("Nodes", fleet),
                ("Checks", checks),
                ("Days and weeks", trends),
                ("Kubernetes", kube),
                ("Notifications", notifications),
                ("Logs by OTLP", otlp),
                ("The controller itself", controller),
            ),
            "## Agents\n",
            *_sections(
                ("Ranks", ranks),
                ("The agent itself", agent),
                ("Machine", host),
                ("Links", network),
                ("GPUs", gpu),
                ("Logs by OTLP", otlp),
            ),
        ]
    )


def _sections(*subjects: tuple[str, ModuleType]) -> list[str]:
    return [_section(title, subject.FAMILIES) for title, subject in subjects]


def _section(title: str, families: Sequence[Family]) -> str:
    lines = [f"### {title}", "", "| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for family in families:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        kind = type(family).__name__.lower()
        lines.append(f"| `{family.name}` | {kind} | {labels} | {family.text} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
