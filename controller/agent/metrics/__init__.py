"""What Prometheus reads of an agent."""

from controller.agent.metrics.page import FAMILIES, Metrics
from controller.agent.metrics.reading import RankReading, Reading

__all__ = ["FAMILIES", "Metrics", "RankReading", "Reading"]
