"""What Prometheus reads of an agent."""

from controller.agent.observe.metrics.page import FAMILIES, Metrics
from controller.agent.observe.metrics.reading import RankReading, Reading

__all__ = ["FAMILIES", "Metrics", "RankReading", "Reading"]
