"""Ends of workers that found wrong bits, or a step that gave no finite number."""

from __future__ import annotations

import re

from diagnostics.core.rules.exit_meaning import ExitMeaning, ExitRule
from diagnostics.core.rules.table import Rule
from outlast.failures import FailureClass

NUMBERS: tuple[ExitRule, ...] = (
    Rule(
        name="wrong bits on another replica",
        means=ExitMeaning(fault_class=FailureClass.CASCADE),
        pattern=re.compile(r"SilentCorruptionError: step \d+: not this replica"),
        matches=(
            "trainer.recovery.replay.SilentCorruptionError: "
            "step 7: not this replica: one of 1 (n2) "
            "computed other bits than another replica from the same samples and weights",
        ),
        misses=(
            "trainer.recovery.replay.SilentCorruptionError: "
            "step 7: this replica, 1 (n2), computed other "
            "bits than another replica from the same samples and weights",
        ),
    ),
    Rule(
        name="wrong bits somewhere",
        means=ExitMeaning(fault_class=FailureClass.CORRUPT_SOMEWHERE),
        pattern=re.compile(r"SilentCorruptionError: step \d+: one of"),
        matches=(
            "trainer.recovery.replay.SilentCorruptionError: "
            "step 7: one of the replicas 0 (n1), 1 (n2) "
            "computed other bits than another replica from the same samples and weights",
        ),
        misses=(
            "trainer.recovery.replay.SilentCorruptionError: "
            "step 7: this replica, 1 (n2), computed other "
            "bits than another replica from the same samples and weights",
        ),
    ),
    Rule(
        name="wrong bits",
        means=ExitMeaning(fault_class=FailureClass.CORRUPT),
        pattern=re.compile(r"SilentCorruptionError: step \d+: this replica"),
        matches=(
            "trainer.recovery.replay.SilentCorruptionError: "
            "step 7: this replica, 1 (n2), computed other "
            "bits than another replica from the same samples and weights",
        ),
        misses=(
            "trainer.recovery.replay.SilentCorruptionError: "
            "step 7: not this replica: one of 1 (n2) "
            "computed other bits than another replica from the same samples and weights",
            # A line of every rank's traceback.
            "    raise SilentCorruptionError(self._in_words(found))",
        ),
    ),
    Rule(
        name="not a number on another rank",
        means=ExitMeaning(fault_class=FailureClass.CASCADE),
        pattern=re.compile(r"NonFiniteLossError: step \d+: .* of another rank"),
        matches=(
            "trainer.recovery.non_finite.NonFiniteLossError: "
            "step 7: loss 2.25, gradient norm inf of another "
            "rank; lower optimizer.lr, or look at the data of this step",
            "trainer.recovery.non_finite.NonFiniteLossError: "
            "step 7: loss nan of another rank, gradient norm "
            "inf; lower optimizer.lr, or look at the data of this step",
        ),
        misses=(
            "trainer.recovery.non_finite.NonFiniteLossError: "
            "step 7: loss nan, gradient norm inf; lower "
            "optimizer.lr, or look at the data of this step",
        ),
    ),
    Rule(
        name="own gradient not a number",
        means=ExitMeaning(fault_class=FailureClass.NON_FINITE_OWN),
        pattern=re.compile(r"NonFiniteLossError: step \d+: .* of this rank"),
        matches=(
            "trainer.recovery.non_finite.NonFiniteLossError: "
            "step 7: loss 2.25, gradient norm inf of this rank; "
            "lower optimizer.lr, or look at the data of this step",
        ),
        misses=(
            "trainer.recovery.non_finite.NonFiniteLossError: "
            "step 7: loss 2.25, gradient norm inf; lower "
            "optimizer.lr, or look at the data of this step",
        ),
    ),
    Rule(
        name="gradient not a number",
        means=ExitMeaning(fault_class=FailureClass.NON_FINITE_GRADIENT),
        # All ranks share the gradient by then, so this one is no more to blame than others.
        pattern=re.compile(r"NonFiniteLossError: step \d+: loss -?\d\S*, gradient norm"),
        matches=(
            "trainer.recovery.non_finite.NonFiniteLossError: "
            "step 7: loss 2.25, gradient norm inf; lower "
            "optimizer.lr, or look at the data of this step",
            "trainer.recovery.non_finite.NonFiniteLossError: "
            "step 7: loss 1e-05, gradient norm inf; lower "
            "optimizer.lr, or look at the data of this step",
        ),
        misses=(
            "trainer.recovery.non_finite.NonFiniteLossError: "
            "step 7: loss -inf, gradient norm inf; lower "
            "optimizer.lr, or look at the data of this step",
        ),
    ),
    Rule(
        name="not a number",
        means=ExitMeaning(fault_class=FailureClass.NON_FINITE),
        pattern=re.compile(r"NonFiniteLossError: "),
        matches=(
            "trainer.recovery.non_finite.NonFiniteLossError: "
            "step 7: loss nan, gradient norm inf; lower "
            "optimizer.lr, or look at the data of this step",
        ),
        misses=(
            "step 7: overflow at loss scale 65536.0; skipped",
            # A line of every rank's traceback.
            "    raise NonFiniteLossError(",
        ),
    ),
)
