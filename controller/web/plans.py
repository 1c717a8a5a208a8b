"""What a job will need, for the JSON API.

The arithmetic is the trainer's, which the controller does not import: the program that starts
a controller passes it in (`Options.plan_job`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from controller.planner import PlanJob
from controller.web.gateway import RequestError
from outlast.devices import DEVICES, find_device, parse_quantity
from outlast.facts import finite
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec

# As long as a submit's plan may take.
PLAN_S = 20.0
ASSUMED = ("device", "link", "kernels")


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
        device, link, kernels = _checked(assumed)
        spec = await asyncio.to_thread(parse_spec, document)
        names = [each.name for each in DEVICES]
        if spec.is_script:
            why = "what a script needs cannot be estimated: its model is its own"
            return {"plan": None, "reason": why, "devices": names}
        found = await self._made(spec, device, link, kernels)
        return {"plan": finite(found), "reason": "", "devices": names}

    async def _made(
        self, spec: JobSpec, device: str, link: str, kernels: float | None
    ) -> dict[str, Any]:
        if self._plan_job is None:
            raise RequestError(
                501,
                "this controller makes no plans: it was not started by `outlast`",
                reason="NO_PLANS",
            )
        try:
            async with asyncio.timeout(PLAN_S), self._turn:
                return await asyncio.to_thread(self._plan_job, spec, device, link, kernels)
        except TimeoutError as error:
            raise RequestError(
                429,
                f"the job's plan took longer than {PLAN_S:g} s; `outlast plan` makes it elsewhere",
                reason="PLAN_TOO_SLOW",
            ) from error


def _checked(assumed: Mapping[str, Any]) -> tuple[str, str, float | None]:
    device, link, kernels = (assumed.get(name) for name in ASSUMED)
    if device:
        _check("device", device, find_device)
    if link:
        _check("link", link, lambda text: parse_quantity(text, "B/s"))
    is_share = isinstance(kernels, int | float) and 0.01 <= kernels <= 1.0
    if kernels is not None and not is_share:
        _refuse("kernels", f"is {kernels!r}; allowed: 0.01 to 1")
    return device or "", link or "", kernels


def _check(name: str, value: object, read: Any) -> None:
    if not isinstance(value, str):
        _refuse(name, f"is {value!r}; allowed: text")
    try:
        read(value)
    except ValueError as error:
        _refuse(name, str(error))


def _refuse(name: str, wrong: str) -> None:
    raise RequestError(400, f"{name}: {wrong}", fields=((name, wrong),))
