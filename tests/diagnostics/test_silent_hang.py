"""What is known of a hang of scripts that report no operations."""

from __future__ import annotations

from diagnostics.core.describe_ranks import where_all_stand
from diagnostics.core.hang import HangKind, analyse
from diagnostics.core.rank_facts import Groups, RankFacts, facts_of
from outlast.blackbox import Phase
from outlast.layout import Layout
from tests.diagnostics.spoken import facts_from_words


def silent(states: str, *, silent_s: float = 600.0) -> list[RankFacts]:
    """Scripts that have reported nothing, by the states of their processes; each a second more."""
    return [
        facts_of(
            rank,
            Phase.STARTING,
            None,
            Groups(Layout(dp=len(states))),
            process_state=state,
            reports_no_steps=True,
            stalled_s=silent_s + rank if silent_s else 0.0,
        )
        for rank, state in enumerate(states)
    ]


def test_of_scripts_that_are_all_asleep_none_is_named() -> None:
    verdict = analyse(silent("SSSS"))
    assert (verdict.kind, verdict.culprits) == (HangKind.UNREPORTED, ())
    assert not verdict.is_program_error
    assert verdict.reason == (
        "ranks 0-3 do not report operations: what each waits for is not known"
    )
    assert where_all_stand(silent("SSSS")) == [
        "ranks 0-3 at an operation that is not known "
        "(no output and hardly any CPU time for 600 s, asleep)"
    ]


def test_a_script_alone_is_not_said_to_be_many() -> None:
    assert analyse(silent("S")).reason.startswith("rank 0 does not report operations")


def test_of_silent_scripts_one_in_the_kernel_is_named() -> None:
    verdict = analyse(silent("SDSS"))
    assert (verdict.kind, verdict.culprits) == (HangKind.IN_KERNEL, (1,))
    assert "rank 1 in the kernel, not to be woken" in verdict.reason
    assert "for 601 s" in verdict.reason
    assert where_all_stand(silent("SDSS"))[0].startswith("rank 1 at an operation")


def test_scripts_that_are_all_in_the_kernel_wait_for_something_else() -> None:
    assert analyse(silent("DD")).culprits == ()


def test_a_stopped_script_is_named_while_the_others_still_seem_to_work() -> None:
    facts = silent("STS", silent_s=0.0)
    verdict = analyse(facts)
    assert (verdict.kind, verdict.culprits) == (HangKind.STOPPED, (1,))
    assert where_all_stand(facts) == [
        "rank 1 at an operation that is not known (it reports no steps, stopped)",
        "ranks 0, 2 at an operation that is not known (it reports no steps)",
    ]


def test_a_silent_script_that_others_wait_for_is_named() -> None:
    """Some ranks report their operations; it has not come to its first."""
    layout = Layout(dp=3)
    facts = [
        facts_from_words(rank, "data", "in world barrier #1", layout) if rank else each
        for rank, each in enumerate(silent("SSS"))
    ]
    verdict = analyse(facts)
    assert (verdict.kind, verdict.culprits) == (HangKind.BUSY_ELSEWHERE, (0,))
    assert verdict.reason.startswith(
        "rank 0 is in no operation (no output and hardly any CPU time for 600 s, asleep) "
        "and ranks 1, 2 wait for it"
    )
