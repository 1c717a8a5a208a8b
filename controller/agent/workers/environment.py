"""What the processes below an agent find in their environment."""

from __future__ import annotations

from collections.abc import Mapping

from outlast.clock import node_clock_environment
from outlast.worker_contract import GLOO_INTERFACE

# One thread per library: a child forked after a parallel operation would hang, and
# results must not depend on how many cores a node has. TCPStore asks for the name
# of every peer: without these limits a lost DNS reply stalls a start for 5 seconds.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RES_OPTIONS": "timeout:1 attempts:1",
    "PYTHONUNBUFFERED": "1",
}

# glibc asks for huge pages where the kernel gives them on request: a new worker touches tens
# of megabytes for the first time, which costs a fault for every 4 KiB otherwise (50 ms of a
# restart's 500 on a CPU). What somebody has tuned stays as it is.
_TUNABLES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def standby_environment(given: Mapping[str, str], *, interface: str) -> dict[str, str]:
    """What a standby process and its workers find in their environment.

    `interface` has the node's address; gloo would take that of the host's name, which many hosts
    have on loopback. "" where it is not known. What somebody has set stays, but on loopback.
    """
    known = {GLOO_INTERFACE: interface} if interface else {}
    before, behind = ({}, known) if interface == "lo" else (known, {})
    return {
        **_TUNABLES,
        **before,
        **given,
        **_ENVIRONMENT,
        **node_clock_environment(),
        **behind,
    }


def program_environment(given: Mapping[str, str]) -> dict[str, str]:
    """What other programs find there; memory is as fast for all that compare themselves."""
    return {**_TUNABLES, **given}
