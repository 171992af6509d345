"""An OpenAI-compatible API on loopback that fails as it is told to: a list of what to do with each
request, and of the requests that came.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """What is sent instead of an answer: a status and a body, after so many seconds; of status 0,
    the connection is cut.
    """

    status: int = 500
    body: str = '{"error": {"message": "out of order"}}'
    seconds: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class StandInApi:
    """`reply` answers what no failure is planned for, by a ValueError with status 400; failures
    are used up one by one.
    """

    reply: Callable[[str, Body], Body]
    url: str = ""
    failures: list[Failure] = field(default_factory=list)
    requests: list[tuple[str, Body]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    most_at_once: int = 0
    at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def _handler(api: StandInApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _respond(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.loads(content or b"{}")
            path = self.path.removeprefix("/v1")
            with api.lock:
                api.requests.append((path, body))
                api.keys.add(self.headers.get("Authorization", ""))
                failure = api.failures.pop(0) if api.failures else None
                api.at_once += 1
                api.most_at_once = max(api.most_at_once, api.at_once)
            try:
                self._send(failure, path, body)
            finally:
                with api.lock:
                    api.at_once -= 1

        do_GET = do_POST = _respond

        def _send(self, failure: Failure | None, path: str, body: Body) -> None:
            if failure is None:
                try:
                    self._write(200, json.dumps(api.reply(path, body)), {})
                except ValueError as refused:
                    self._write(400, json.dumps({"error": {"message": str(refused)}}), {})
                return
            time.sleep(failure.seconds)
            if failure.status:
                self._write(failure.status, failure.body, failure.headers)
            else:
                self.close_connection = True

        def _write(self, status: int, text: str, headers: dict[str, str]) -> None:
            content = text.encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the client has given up

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass  # `api.requests` has them

    return Handler


@contextmanager
def stand_in_api(reply: Callable[[str, Body], Body]) -> Iterator[StandInApi]:
    """Serve on a free loopback port for as long as the block runs."""
    api = StandInApi(reply)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(api))
    api.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
