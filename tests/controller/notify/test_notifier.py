"""A controller notifies of its jobs' events once, also when it or a receiver was away."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.core.changes import State
from controller.core.notifications.job_events import JobEvent, job_events
from controller.notify import notifier, senders
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


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The notifier polls often; of each poll there is an entry."""
    monkeypatch.setattr(notifier, "POLL_PERIOD_S", 0.02)
    monkeypatch.setattr(notifier, "FIRST_RETRY_S", 0.05)
    found: list[float] = []

    def counted(state: State, since_s: float) -> Iterator[JobEvent]:
        found.append(since_s)
        return job_events(state, since_s)

    monkeypatch.setattr(notifier, "job_events", counted)
    return found


async def several(polls: list[float]) -> None:
    """Wait until what is due must have been sent."""
    before = len(polls)
    await until(lambda: len(polls) >= before + 10, "ten more polls")


def kinds(receiver: HttpReceiver) -> list[str]:
    return [each["kind"] for _, body in receiver.got for each in json.loads(body)["events"]]


async def kill_and_recover(it: Lab, job_id: str) -> None:
    """A worker is killed, and the job trains on, past where it was."""
    await it.agents[0].exit(0, -9, step=1)
    await it.started(2)
    await it.train(5)
    await it.reach(job_id, "RUNNING")


def test_fault_recovery_and_end_are_sent_once(tmp_path: Path, polls: list[float]) -> None:
    asyncio.run(_fault_recovery_and_end_are_sent_once(tmp_path, polls))


async def _fault_recovery_and_end_are_sent_once(tmp_path: Path, polls: list[float]) -> None:
    with http_receiver() as it, http_receiver() as failures:
        settings = notify_of(it, failures)
        some = settings.receivers["webhook.r1"].model_copy(update={"events": ("failure",)})
        settings = Notify(receivers={**settings.receivers, "webhook.r1": some}, page="http://page")
        async with lab(tmp_path, notify=settings) as bench:
            await bench.add_agents(2)
            job_id = await bench.start_job()
            await kill_and_recover(bench, job_id)
            await until(lambda: kinds(it) == ["incident", "recovery"], "both are sent")
            for agent in bench.agents:
                await agent.exit(next(iter(agent.running)), 0, step=10)
            await bench.agents[0].commit(job_id, 10, attempt=2)
            await bench.reach(job_id, "SUCCEEDED")
            await until(lambda: len(kinds(it)) == 3, "its end is sent")
            sent = 'outlast_notifications_total{outcome="%s",receiver="webhook.%s"} %s'
            page = await asyncio.to_thread(metrics_of, bench)
            # It counts messages, one of which may tell of two events, once they are answered.
            counted = sent % ("sent", "r0", float(len(it.got)))
            async with asyncio.timeout(60):
                while counted not in page:
                    await asyncio.sleep(0.05)
                    page = await asyncio.to_thread(metrics_of, bench)
            assert sent % ("sent", "r1", "0.0") in page
        # Another controller on the same state has nothing more to send.
        async with lab(tmp_path, notify=settings):
            await several(polls)
    assert kinds(it) == ["incident", "recovery", "completion"]
    assert failures.got == []
    fault, recovery, end = (event for _, body in it.got for event in json.loads(body)["events"])
    assert {event["job"] for event in (fault, recovery, end)} == {job_id}
    # Of the fault the cause was perhaps not known yet: it is sent at once here.
    assert recovery["cause"] == "worker_killed"
    assert fault["incident"] == recovery["incident"]


def test_what_happened_meanwhile_is_sent_later(tmp_path: Path, polls: list[float]) -> None:
    """The receiver is away, so is then the controller; one that is there is not held up."""
    asyncio.run(_what_happened_meanwhile_is_sent_later(tmp_path, polls))


async def _what_happened_meanwhile_is_sent_later(tmp_path: Path, polls: list[float]) -> None:
    with http_receiver() as away, http_receiver() as here:
        away.status = 503
        async with lab(tmp_path, notify=notify_of(away, here)) as bench:
            await bench.add_agents(2)
            job_id = await bench.start_job()
            await kill_and_recover(bench, job_id)
            await until(lambda: kinds(here) == ["incident", "recovery"], "the other has them")
            await until(lambda: len(away.got) >= 3, "it is tried again")
        away.status, away.got = 200, []
        async with lab(tmp_path, notify=notify_of(away, here)):
            await until(lambda: kinds(away) == ["incident", "recovery"], "it is sent later")
            await several(polls)
    assert kinds(here) == ["incident", "recovery"]
    assert kinds(away) == ["incident", "recovery"]


def test_what_was_before_a_receiver_is_not_sent(tmp_path: Path, polls: list[float]) -> None:
    asyncio.run(_what_was_before_a_receiver_is_not_sent(tmp_path, polls))


async def _what_was_before_a_receiver_is_not_sent(tmp_path: Path, polls: list[float]) -> None:
    async with lab(tmp_path) as bench:
        await bench.add_agents(2)
        job_id = await bench.start_job()
        await kill_and_recover(bench, job_id)
    with http_receiver() as it:
        async with lab(tmp_path, notify=notify_of(it)):
            await several(polls)
        assert it.got == []
        # A file that is damaged begins anew, and does not end the controller.
        (tmp_path / notifier.FILE_NAME).write_text('{"webhook.r0": {"since_s": "x"')
        async with lab(tmp_path, notify=notify_of(it)):
            await several(polls)
        assert it.got == []


@pytest.mark.timeout(30)
def test_a_receiver_that_does_not_answer_keeps_no_controller_from_stopping(
    tmp_path: Path, polls: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(senders, "TIMEOUT_S", 300.0)
    with http_receiver() as it:
        it.answers.clear()

        async def scenario() -> None:
            async with lab(tmp_path, notify=notify_of(it)) as bench:
                await bench.add_agents(2)
                await kill_and_recover(bench, await bench.start_job())
                await until(lambda: len(it.got) > 0, "a message is on its way")

        asyncio.run(scenario())
        assert not it.answers.is_set()


def test_without_receivers_nothing_is_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path):
            pass

    asyncio.run(scenario())
    assert not (tmp_path / notifier.FILE_NAME).exists()


def metrics_of(bench: Lab) -> str:
    with urllib.request.urlopen(f"http://{bench.running.http}/metrics", timeout=10) as answer:
        page: str = answer.read().decode()
    return page


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
        file.with_name("none.yaml").write_text("notify: {page: 'http://page'}")
        nobody = outlast("notify", "--config", str(file.with_name("none.yaml")))
        assert nobody.returncode == 2
        assert "names no receivers" in nobody.stderr
        unknown = outlast("notify", "--config", str(file), "--receiver", "webhook.c")
        assert unknown.returncode == 2
        assert "webhook.a, webhook.b" in unknown.stderr
    assert "a test of notifications" in json.loads(it.got[0][1])["text"]
