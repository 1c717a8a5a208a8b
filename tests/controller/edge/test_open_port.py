"""A controller that others can reach has all that asks who they are, or was started knowingly."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controller import app
from controller.kube.config import KubeConfig
from controller.options import Options

KUBE = KubeConfig(namespace="train", image="outlast:1", controller="c:7070")
EVERYWHERE = {"grpc": "0.0.0.0:0", "http": "127.0.0.1:0"}


def options(folder: Path, **given: object) -> Options:
    return Options(state_dir=folder, **{**EVERYWHERE, **given})  # type: ignore[arg-type]


def test_who_is_told_in_words_listens_and_says_what_it_means(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(**given: object) -> None:
        stop = asyncio.Event()
        await app.run(options(tmp_path, **given), lambda running: stop.set(), stop=stop)

    asyncio.run(scenario(grpc="127.0.0.1:0"))
    assert "run programs on every node" not in caplog.text
    asyncio.run(scenario(insecure=True))
    assert "run programs on every node" in caplog.text


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, ["--tls-dir", "--tokens-file"]),
        ({"tls_dir": Path("t")}, ["--tokens-file"]),
        # Outside of Kubernetes it makes a join token itself.
        ({"tls_dir": Path("t"), "tokens_file": Path("f")}, []),
        ({"tls_dir": Path("t"), "tokens_file": Path("f"), "kube": KUBE}, ["--join-token-file"]),
        ({"tokens_file": Path("f"), "join_token_file": Path("j")}, ["--tls-dir"]),
        ({"tls_dir": Path("t"), "client_certificates": True}, []),
        ({"tls_dir": Path("t"), "tokens_file": Path("f"), "join_token_file": Path("j")}, []),
        ({"tls_dir": Path("t"), "tokens_file": Path("f"), "local_nodes": 1}, []),
        ({"grpc": "127.0.0.1:0"}, []),
        ({"grpc": "[::1]:0"}, []),
        ({"grpc": "localhost:0", "http": "0.0.0.0:0"}, []),
        (
            {"grpc": "127.0.0.1:0", "http": "0.0.0.0:0", "open_http": True},
            ["--tls-dir", "--tokens-file"],
        ),
    ],
)
def test_what_is_missing_beyond_loopback_is_named(
    tmp_path: Path, given: dict[str, object], missing: list[str]
) -> None:
    if not missing:
        options(tmp_path, **given)
        return
    with pytest.raises(ValueError, match="could run programs on every node") as caught:
        options(tmp_path, **given)
    named = [
        each
        for each in ("--tls-dir", "--tokens-file", "--join-token-file")
        if f"{each} " in str(caught.value)
    ]
    assert named == missing


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"client_certificates": True}, "--client-certificates goes with --tls-dir"),
        (
            {"client_certificates": True, "tls_dir": Path("t"), "local_nodes": 1},
            "takes a certificate for each node",
        ),
        (
            {"client_certificates": True, "tls_dir": Path("t"), "kube": KUBE},
            "takes a certificate for each node",
        ),
    ],
)
def test_certificates_need_an_authority_and_nodes_that_have_one(
    tmp_path: Path, given: dict[str, object], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        options(tmp_path, **given)
