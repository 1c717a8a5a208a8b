"""What a job will need, for the JSON API.

The arithmetic is the trainer's, which the controller does not import: the program that starts
a controller passes it in (`Options.plan_job`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from controller.planner import OnMachine, PlanJob
from controller.web.gateway import RequestError
from outlast.devices import DEVICES, find_device, parse_quantity
from outlast.facts import finite
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec

# As long as a submit's plan may take.
PLAN_S = 20.0
ASSUMED = ("device", "link", "latency_us", "kernels")
# As `outlast plan` takes them.
_MOST_LATENCY_US = 1e6
_LEAST_KERNELS = 0.01


class Plans:
    """Makes plans, one at a time: each may take a core for seconds."""

    def __init__(self, plan_job: PlanJob | None) -> None:
        self._plan_job = plan_job
        self._turn = asyncio.Lock()

    async def plan(self, document: dict[str, Any], assumed: Mapping[str, Any]) -> dict[str, Any]:
        """The plan of a spec, for a step on the assumed device.

        Raises:
            SpecError: the spec is wrong.
            RequestError: what is assumed makes no sense, or it takes too long.
        """
        machine = _checked(assumed)
        spec = await asyncio.to_thread(parse_spec, document)
        names = [each.name for each in DEVICES]
        if spec.is_script:
            why = "what a script needs cannot be estimated: its model is its own"
            return {"plan": None, "reason": why, "devices": names}
        found = await self._made(spec, machine)
        return {"plan": finite(found), "reason": "", "devices": names}

    async def _made(self, spec: JobSpec, machine: OnMachine) -> dict[str, Any]:
        if self._plan_job is None:
            raise RequestError(
                501,
                "this controller makes no plans: it was not started by `outlast`",
                reason="NO_PLANS",
            )
        try:
            async with asyncio.timeout(PLAN_S), self._turn:
                return await asyncio.to_thread(self._plan_job, spec, machine)
        except TimeoutError as error:
            raise RequestError(
                429,
                f"the job's plan took longer than {PLAN_S:g} s; `outlast plan` makes it elsewhere",
                reason="PLAN_TOO_SLOW",
            ) from error


def _checked(assumed: Mapping[str, Any]) -> OnMachine:
    device, link = assumed.get("device"), assumed.get("link")
    if device:
        _check("device", device, find_device)
    if link:
        _check("link", link, lambda text: parse_quantity(text, "B/s"))
    return OnMachine(
        device=device or "",
        link=link or "",
        latency_us=_number(assumed, "latency_us", 0.0, _MOST_LATENCY_US),
        kernels=_number(assumed, "kernels", _LEAST_KERNELS, 1.0),
    )


def _number(assumed: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    value = assumed.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and least <= value <= most):
        _refuse(name, f"is {value!r}; allowed: {least:g} to {most:.7g}")
    return value


def _check(name: str, value: object, read: Any) -> None:
    if not isinstance(value, str):
        _refuse(name, f"is {value!r}; allowed: text")
    try:
        read(value)
    except ValueError as error:
        _refuse(name, str(error))


def _refuse(name: str, wrong: str) -> None:
    raise RequestError(400, f"{name}: {wrong}", fields=((name, wrong),))
