"""What the report of an end-to-end test that fails says."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

# Without processes: what becomes of jobs is for `test_faults.py`.
CONFTEST = """
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.conftest import pytest_runtest_makereport

class Quiet(Cluster):
    def clear(self):
        return "job-1: RUNNING, attempt 2"

@pytest.fixture
def cluster():
    return Quiet(Path(), str)
"""
TESTS = """
def test_that_fails(cluster):
    assert False

def test_that_passes(cluster):
    pass

def test_without_a_cluster():
    assert False
"""


def test_only_a_test_that_fails_says_what_became_of_its_jobs(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    done = pytester.runpytest_inprocess()
    done.assert_outcomes(passed=1, failed=2)
    done.stdout.fnmatch_lines(["*- jobs -*", "job-1: RUNNING, attempt 2"])
    assert done.stdout.str().count("job-1: RUNNING") == 1
