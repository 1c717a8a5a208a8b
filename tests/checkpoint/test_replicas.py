"""Copies of slots between two agents' host memories, over real sockets and `sendfile`."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from checkpoint.core.names import memory_folder, replica_folder
from checkpoint.replicas import wire as replica_wire
from checkpoint.replicas.encryption import Encryption
from checkpoint.replicas.holder import Duty
from checkpoint.replicas.wire import ReplicaError
from checkpoint.restore.restore import SealedStep, load_memory, sealed_steps
from checkpoint.stage import slotfile
from checkpoint.stage.payload import NamedTensor, make_table
from tests.checkpoint.copying import (
    JOB,
    TOKEN,
    Spoiler,
    holding,
    listening_in,
    make_replicated_stager,
    peer_at,
    save,
    sending,
    steps_held,
)
from tests.checkpoint.helpers import make_tensors, same_bits, wait_for

LARGE = 6 << 18  # 12 MB of doubles: three pieces


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


def large_tensors(seed: int = 1) -> list[NamedTensor]:
    made = torch.Generator().manual_seed(seed)
    values = torch.randn(LARGE, generator=made, dtype=torch.float64)
    return [NamedTensor("model.weight", values, (LARGE,), (0,))]


def test_copy_has_the_bits_of_what_was_sealed(here: Path, there: Path) -> None:
    tensors = make_tensors(1, ranks=2)
    stager = make_replicated_stager(here, tensors)
    with holding(there) as holder, sending(here, peer_at(holder.port)) as it:
        save(stager, 7)
        wait_for(lambda: stager.newest_replicated == 7, "a copy of step 7")
        assert steps_held(there, tensors) == [7]
        assert it.replicator.sent_bytes == holder.received_bytes > 0
        assert holder.outcomes == {"kept": 1}
    copied = make_tensors(2, ranks=2)
    extra = load_memory(there / JOB / replica_folder(0), SealedStep(7, 1), copied)
    assert extra == {"step": 7}
    assert same_bits(copied, tensors)
    # Frames too: what is fetched back is uploaded one day.
    own = next((here / JOB / memory_folder(0)).glob("slot-0")).read_bytes()
    sealed = slice(4096, slotfile.sums_at(make_table(0, 2, tensors).payload_bytes))
    copied_bytes = (there / JOB / replica_folder(0) / "slot-0").read_bytes()
    assert copied_bytes[sealed] == own[sealed]


def test_newest_whole_copy_stays_while_the_next_one_arrives(here: Path, there: Path) -> None:
    tensors = make_tensors(1, ranks=2)
    stager = make_replicated_stager(here, tensors)
    with holding(there) as holder, sending(here, peer_at(holder.port)):
        for step in (1, 2, 3):
            save(stager, step)
            wait_for(lambda step=step: stager.newest_replicated == step, f"a copy of {step}")
        assert steps_held(there, tensors) == [3, 2]


def test_rank_whose_state_others_hold_sends_nothing(here: Path) -> None:
    stager = make_replicated_stager(here, make_tensors(1, ranks=2))
    with sending(here, None) as it:
        save(stager, 1)
        wait_for(lambda: stager.newest_replicated == 1, "the step to count as copied")
        assert it.replicator.sent_bytes == 0


def test_copy_that_is_there_already_is_not_sent_again(here: Path, there: Path) -> None:
    tensors = make_tensors(1, ranks=2)
    stager = make_replicated_stager(here, tensors)
    with holding(there) as holder:
        with sending(here, peer_at(holder.port)):
            save(stager, 5)
            wait_for(lambda: stager.newest_replicated == 5, "a copy of step 5")
        before = holder.received_bytes
        holder.take_duty(JOB, Duty(attempt=2, ranks=frozenset([0]), bytes_per_s=None))
        again = make_replicated_stager(here, tensors, attempt=2)
        again.resumed(5)
        assert again.replica_busy
        with sending(here, peer_at(holder.port), attempt=2):
            wait_for(lambda: again.newest_replicated == 5, "the holder to be asked")
        assert holder.received_bytes == before


@pytest.fixture
def spoiled(there: Path) -> Iterator[Spoiler]:
    with holding(there) as holder:
        spoiler = Spoiler(holder.port)
        yield spoiler
        spoiler.close()


@pytest.mark.parametrize("byte", [6_000, 1 << 22, 12 << 20])
def test_byte_that_flips_on_the_way_is_noticed_and_sent_again(
    here: Path, there: Path, spoiled: Spoiler, byte: int
) -> None:
    tensors = large_tensors()
    stager = make_replicated_stager(here, tensors)
    spoiled.flip_at = byte
    with sending(here, peer_at(spoiled.port)):
        save(stager, 1)
        wait_for(lambda: bool(list(there.glob("*/*/*/slot-0"))), "a copy to begin")
        assert steps_held(there, tensors) == []
        spoiled.flip_at = None
        wait_for(lambda: stager.newest_replicated == 1, "a copy that is whole")
    copied = large_tensors(2)
    load_memory(there / JOB / replica_folder(0), SealedStep(1, 1), copied)
    assert same_bits(copied, tensors)


def test_connection_that_breaks_leaves_the_copy_before(
    here: Path, there: Path, spoiled: Spoiler
) -> None:
    tensors = large_tensors()
    stager = make_replicated_stager(here, tensors)
    with sending(here, peer_at(spoiled.port)):
        save(stager, 1)
        wait_for(lambda: stager.newest_replicated == 1, "a copy of step 1")
    spoiled.cut_at = 6 << 20
    with sending(here, peer_at(spoiled.port)):
        save(stager, 2)
        wait_for(lambda: len(list(there.glob("*/*/*/slot-*"))) == 2, "a copy of step 2 to begin")
        assert steps_held(there, tensors) == [1]
        spoiled.cut_at = None
        wait_for(lambda: stager.newest_replicated == 2, "the copy of step 2")
        assert steps_held(there, tensors) == [2, 1]


def test_attempt_that_is_over_is_turned_away(here: Path, there: Path) -> None:
    tensors = make_tensors(1, ranks=2)
    stager = make_replicated_stager(here, tensors)
    with holding(there, attempt=2) as holder, sending(here, peer_at(holder.port)) as it:
        save(stager, 1)
        wait_for(lambda: not stager.replica_busy, "the copy to be given up")
        assert holder.outcomes == {"refused": 1}
        # Its workers are being stopped: no news to anybody.
        assert not it.troubles
        assert steps_held(there, tensors) == []


def test_attempt_that_ends_while_its_copy_arrives_does_not_get_it_sealed(
    here: Path, there: Path
) -> None:
    tensors = large_tensors()
    stager = make_replicated_stager(here, tensors)
    slow = 4.0 * 2**20
    with holding(there) as holder, sending(here, peer_at(holder.port), bytes_per_s=slow):
        save(stager, 1)
        wait_for(lambda: bool(list(there.glob("*/*/*/slot-0"))), "a copy to begin")
        holder.take_duty(JOB, Duty(attempt=2, ranks=frozenset([0]), bytes_per_s=None))
        wait_for(lambda: not stager.replica_busy, "the copy to be given up")
        assert steps_held(there, tensors) == []
        assert holder.outcomes["kept"] == 0


def test_agent_that_has_not_heard_of_the_attempt_is_asked_again(here: Path, there: Path) -> None:
    tensors = make_tensors(1, ranks=2)
    stager = make_replicated_stager(here, tensors, attempt=2)
    with holding(there, attempt=1) as holder, sending(here, peer_at(holder.port), attempt=2):
        save(stager, 1)
        wait_for(lambda: holder.outcomes["refused"] > 0, "a refusal")
        assert stager.replica_busy
        holder.take_duty(JOB, Duty(attempt=2, ranks=frozenset([0]), bytes_per_s=None))
        wait_for(lambda: stager.newest_replicated == 1, "a copy")


def test_wrong_token_gets_nowhere(here: Path, there: Path) -> None:
    with holding(there) as holder, pytest.raises(replica_wire.ReplicaError, match="token"):
        replica_wire.connect(peer_at(holder.port, token="another"), JOB, 1)


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_encrypted_copies_have_the_same_bits_and_nobody_reads_them_on_the_way(
    here: Path, there: Path, is_encrypted: bool
) -> None:
    tensors = large_tensors()
    stager = make_replicated_stager(here, tensors)
    encryption = Encryption() if is_encrypted else None
    token = TOKEN if encryption is None else encryption.token(TOKEN)
    with (
        holding(there, encryption=encryption) as holder,
        listening_in(holder.port) as between,
        sending(here, peer_at(between.port, token=token)) as it,
    ):
        save(stager, 7)
        wait_for(lambda: stager.newest_replicated == 7, "a copy of step 7")
        assert steps_held(there, tensors) == [7]
        assert it.replicator.sent_bytes == holder.received_bytes > 0
    heard = bytes(between.heard)
    assert len(heard) > LARGE * 8
    state = tensors[0].tensor.numpy().tobytes()[:64]
    for word in (TOKEN.encode(), b'"kind": "put"', state):
        assert (word in heard) is not is_encrypted


def test_another_agent_in_the_place_of_one_gets_neither_token_nor_copy(there: Path) -> None:
    meant, other = Encryption(), Encryption()
    with holding(there, encryption=other) as holder:
        peer = peer_at(holder.port, token=meant.token(TOKEN))
        with pytest.raises(replica_wire.ReplicaError, match="who answers there is another agent"):
            replica_wire.connect(peer, JOB, 1)


def test_who_does_not_encrypt_does_not_get_through_to_who_does(there: Path) -> None:
    with holding(there, encryption=Encryption()) as holder, pytest.raises((OSError, ReplicaError)):
        replica_wire.connect(peer_at(holder.port), JOB, 1)


def test_rank_that_is_kept_elsewhere_now_is_refused_and_its_copies_go(
    here: Path, there: Path
) -> None:
    tensors = make_tensors(1, ranks=2)
    stager = make_replicated_stager(here, tensors)
    with holding(there) as holder, sending(here, peer_at(holder.port)):
        save(stager, 1)
        wait_for(lambda: stager.newest_replicated == 1, "a copy")
        holder.take_duty(JOB, Duty(attempt=1, ranks=frozenset([1]), bytes_per_s=None))
        assert not (there / JOB / replica_folder(0)).exists()
        save(stager, 2)
        wait_for(lambda: not stager.replica_busy, "the copy to be given up")
        assert holder.outcomes == {"kept": 1, "refused": 1}


def test_dead_holder_holds_up_nothing_and_is_told_once(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DESIGN section 5: a slow or dead peer never slows training."""
    monkeypatch.setattr(replica_wire, "_GRACE_S", 1.0)
    stager = make_replicated_stager(here, make_tensors(1, ranks=2))
    with sending(here, peer_at(1)) as it:
        for step in range(1, 40):
            replicate = not stager.replica_busy
            assert stager.save(step, {}, upload=False, common_step=step - 1, replicate=replicate), (
                f"no room at step {step}"
            )
        wait_for(lambda: not stager.replica_busy, "the copy to be given up")
        save(stager, 40)
        stager.save(41, {}, upload=False, common_step=40)
        wait_for(lambda: not stager.replica_busy, "the next to be given up")
        assert len(it.troubles) == 1
        assert "node other" in it.troubles[0]
    assert stager.newest_replicated == -1


def test_listener_ends_though_its_socket_cannot_be_shut_down(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_socket: socket.socket, _how: int) -> None:
        raise OSError("no")

    def listeners() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "replica-listen"}

    before = listeners()
    with holding(there, attempt=1):
        (listener,) = listeners() - before
        monkeypatch.setattr(socket.socket, "shutdown", refuse)
    wait_for(lambda: not listener.is_alive(), "the listener ends")


def begin(role: str, folder: Path, port: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.checkpoint.copying", role, str(folder), str(port)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def is_arriving(there: Path) -> bool:
    """Whether the payload of a copy has begun to come: it is never zero there."""
    for path in there.glob("*/*/*/slot-*"):
        with path.open("rb") as file:
            file.seek(1 << 20)
            if any(file.read(4096)):
                return True
    return False


def test_sigkill_of_the_sender_leaves_no_copy_that_is_not_whole(here: Path, there: Path) -> None:
    tensors = large_tensors()
    stager = make_replicated_stager(here, tensors)
    with holding(there) as holder:
        save(stager, 1)
        with begin("send", here, holder.port) as sender:
            wait_for(partial(is_arriving, there), "a copy to be on its way")
            sender.kill()
        wait_for(lambda: holder.outcomes["torn"] == 1, "the holder to notice")
        assert steps_held(there, tensors) == []
        # The next agent on the node goes on with what the last one was about.
        assert stager.replica_busy
        with sending(here, peer_at(holder.port)):
            wait_for(lambda: stager.newest_replicated == 1, "the copy")
        assert steps_held(there, tensors) == [1]


def test_sigkill_of_the_holder_leaves_no_copy_that_is_not_whole(here: Path, there: Path) -> None:
    tensors = large_tensors()
    stager = make_replicated_stager(here, tensors)
    with begin("hold", there) as holder:
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        slow = 4.0 * 2**20
        with sending(here, peer_at(port), bytes_per_s=slow):
            save(stager, 1)
            wait_for(partial(is_arriving, there), "a copy to be on its way")
            holder.kill()
            holder.wait()
    assert steps_held(there, tensors) == []
    assert sealed_steps(here / JOB / memory_folder(0), tensors) == [SealedStep(1, 1)]
