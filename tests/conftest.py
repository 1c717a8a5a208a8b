"""Options of the whole suite; pytest takes them from here only."""

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from tests.few_cores import allow_huge_pages, share_cores

# What tests have children import (`tests.agent.entry`): processes of ours leave their current
# folder out.
_PLACES = (str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")]))
os.environ["PYTHONPATH"] = os.pathsep.join(_PLACES)

# Tests run several at once on few cores: maths threads that wait for each other there spin
# instead of leaving the core to another test. All processes of tests inherit these.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

share_cores()
allow_huge_pages(False)

# What nohup, or a shell that puts the tests into the background, has them ignore is ignored by
# every program that they start, but not by one that is forked from a standby process.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        _is_interrupt = _number == signal.SIGINT
        signal.signal(_number, signal.default_int_handler if _is_interrupt else signal.SIG_DFL)

# What pytest imports and collects lives as long as it does: no collection need visit it, neither
# while it is made nor in any test (accelerate collects after each training: 0.5 s a time).
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


# A machine that does other things too makes any example slow now and then. The same commit is
# tried with the same examples; `make test-properties` looks for others.
settings.register_profile("outlast", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "outlast"))


# The last file to end decides how long all take, so those that take longest begin first, in
# this order. On the command line they would lose their place: pytest takes a file only once,
# with the folder that it is in. A worker with two tests or fewer is given the next file, too, so
# short files come behind the first ones of a few long tests.
LONGEST = (
    "tests/agent/test_faults.py",
    "tests/netns/test_diagnose.py",
    "tests/prometheus/test_real.py",
    "tests/kube/test_scenario.py",
    "tests/sim/test_seeds.py",
    "tests/unit/test_ports.py",
    "tests/unit/test_nearest.py",
    "tests/unit/test_chosen.py",
    "tests/e2e/test_faults.py",
    "tests/e2e/test_examples.py",
    "tests/e2e/test_hangs.py",
    "tests/e2e/test_choosing.py",
    "tests/e2e/test_elastic.py",
    "tests/e2e/test_replicas.py",
    "tests/e2e/test_blame.py",
    "tests/e2e/test_not_a_number.py",
    "tests/torchrun/test_conformance.py",
    "tests/test_demo.py",
    "tests/sim/test_planted_bugs.py",
    "tests/bench/test_checkpoint.py",
    "tests/trainer/test_resume.py",
    "tests/trainer/test_restore_layouts.py",
    "tests/trainer/test_other_job.py",
    "tests/trainer/test_oracles.py",
    "tests/trainer/test_chosen.py",
    "tests/trainer/test_estimate.py",
    "tests/trainer/test_dcp.py",
    "tests/trainer/test_vocab.py",
    "tests/trainer/test_zero.py",
    "tests/agent/test_survival.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {file: number for number, file in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kube",
        choices=("fake", "real"),
        default="fake",
        help="the Kubernetes API server of tests/kube: in memory, or kube-apiserver and etcd "
        "(see `make test-kube`)",
    )
