"""What Prometheus reads of the controller."""

from controller.web.metrics.page import FAMILIES, ControllerMetrics

__all__ = ["FAMILIES", "ControllerMetrics"]
