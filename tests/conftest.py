"""Options of the whole suite; pytest takes them from here only."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# What tests have children import (`tests.agent.entry`): processes of ours leave their current
# folder out.
_PLACES = (str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")]))
os.environ["PYTHONPATH"] = os.pathsep.join(_PLACES)

# A machine that does other things too makes any example slow now and then. The same commit is
# tried with the same examples; `make test-properties` looks for others.
settings.register_profile("outlast", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "outlast"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kube",
        choices=("fake", "real"),
        default="fake",
        help="the Kubernetes API server of tests/kube: in memory, or kube-apiserver and etcd "
        "(see `make test-kube`)",
    )
