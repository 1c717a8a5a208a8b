"""A controller tells what happens to its jobs, once, also when it or a receiver was away."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from controller.notify import notifier
from controller.notify.settings import Notify, Webhook
from tests.cli.running import outlast
from tests.controller.fakes import Lab, lab, until
from tests.controller.notify.receivers import HttpReceiver, http_receiver


def notify_of(*receivers: HttpReceiver, **settings: Any) -> Notify:
    hooks = {
        f"webhook.r{number}": Webhook(url=each.url, wait_s=0, repeat_s=0, **settings)
        for number, each in enumerate(receivers)
    }
    return Notify(receivers=hooks, page="http://page")


def kinds(receiver: HttpReceiver) -> list[str]:
    return [each["kind"] for _, body in receiver.got for each in json.loads(body)["events"]]


async def kill_and_recover(it: Lab, job_id: str) -> None:
    """A worker is killed, and the job trains on, past where it was."""
    await it.agents[0].exit(0, -9, step=1)
    await it.started(2)
    await it.train(5)
    await it.reach(job_id, "RUNNING")


def test_fault_recovery_and_end_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "LOOK_PERIOD_S", 0.02)
    asyncio.run(_fault_recovery_and_end_are_told_once(tmp_path))


async def _fault_recovery_and_end_are_told_once(tmp_path: Path) -> None:
    with http_receiver() as it, http_receiver() as failures:
        settings = notify_of(it, failures)
        some = settings.receivers["webhook.r1"].model_copy(update={"events": ("failure",)})
        settings = Notify(receivers={**settings.receivers, "webhook.r1": some}, page="http://page")
        async with lab(tmp_path, notify=settings) as bench:
            await bench.add_agents(2)
            job_id = await bench.start_job()
            await kill_and_recover(bench, job_id)
            await until(lambda: kinds(it) == ["incident", "recovery"], "both are told")
            for agent in bench.agents:
                await agent.exit(next(iter(agent.running)), 0, step=10)
            await bench.agents[0].commit(job_id, 10, attempt=2)
            await bench.reach(job_id, "SUCCEEDED")
            await until(lambda: len(kinds(it)) == 3, "its end is told")
        # Another controller on the same state has nothing more to tell.
        async with lab(tmp_path, notify=settings):
            await asyncio.sleep(0.2)
    assert kinds(it) == ["incident", "recovery", "completion"]
    assert failures.got == []
    fault = json.loads(it.got[0][1])["events"][0]
    assert (fault["job"], fault["cause"]) == (job_id, "worker_killed")


def test_what_happened_while_nobody_listened_is_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver is away, so is then the controller; one that is there is not held up."""
    monkeypatch.setattr(notifier, "LOOK_PERIOD_S", 0.02)
    monkeypatch.setattr(notifier, "FIRST_RETRY_S", 0.05)
    asyncio.run(_what_happened_while_nobody_listened_is_told_later(tmp_path))


async def _what_happened_while_nobody_listened_is_told_later(tmp_path: Path) -> None:
    with http_receiver() as away, http_receiver() as here:
        away.status = 503
        async with lab(tmp_path, notify=notify_of(away, here)) as bench:
            await bench.add_agents(2)
            job_id = await bench.start_job()
            await kill_and_recover(bench, job_id)
            await until(lambda: kinds(here) == ["incident", "recovery"], "the other is told")
            await until(lambda: len(away.got) >= 3, "it is tried again")
        away.status, away.got = 200, []
        async with lab(tmp_path, notify=notify_of(away, here)):
            await until(lambda: kinds(away) == ["incident", "recovery"], "it is told later")
            await asyncio.sleep(0.2)
    assert kinds(here) == ["incident", "recovery"]
    assert kinds(away) == ["incident", "recovery"]


def test_what_was_before_it_was_wanted_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "LOOK_PERIOD_S", 0.02)
    asyncio.run(_what_was_before_it_was_wanted_is_not_told(tmp_path))


async def _what_was_before_it_was_wanted_is_not_told(tmp_path: Path) -> None:
    async with lab(tmp_path) as bench:
        await bench.add_agents(2)
        job_id = await bench.start_job()
        await kill_and_recover(bench, job_id)
    with http_receiver() as it:
        async with lab(tmp_path, notify=notify_of(it)):
            await asyncio.sleep(0.3)
        assert it.got == []
        # A file that is damaged begins anew, and does not end the controller.
        (tmp_path / notifier.FILE_NAME).write_text('{"webhook.r0": {"since_s": "x"')
        async with lab(tmp_path, notify=notify_of(it)):
            await asyncio.sleep(0.3)
        assert it.got == []


def test_a_test_message_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "controller.yaml"
    with http_receiver() as it, http_receiver() as other:
        file.write_text(
            json.dumps({"notify": {"webhook": {"a": {"url": it.url}, "b": {"url": other.url}}}})
        )
        other.status = 500
        done = outlast("notify", "--config", str(file))
        assert done.returncode == 1
        assert done.stdout == "webhook.a: sent\n"
        assert done.stderr.startswith("webhook.b: it answered 500")
        assert outlast("notify", "--config", str(file), "--receiver", "webhook.a").returncode == 0
        unknown = outlast("notify", "--config", str(file), "--receiver", "webhook.c")
        assert unknown.returncode == 2
        assert "webhook.a, webhook.b" in unknown.stderr
    assert "a test of notifications" in json.loads(it.got[0][1])["text"]
