"""Requests to HTTP servers that may refuse, break, die and come back: many in flight, over several
servers, each repeated until it is answered.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import httpx2

from conf.errors import UserError
from conf.server import ServerConfig

T = TypeVar("T")
R = TypeVar("R")

FIRST_REST, LONGEST_REST = 0.25, 10.0  # seconds a server is left alone after a failure
ATTEMPTS = 6  # at a request whose answers are broken while others are fine
LATER = {408, 425, 429, 502, 503, 504}  # the server asks to come back
SHOWN = 200  # characters of a server's own words


class ServerError(UserError):
    """A server that does not do its part. The message names it and says how to go on."""


class Refused(ServerError):
    """A request that the server will never answer, whoever asks again."""


class Broken(Exception):
    """An answer that is none; another one may be."""


class _Later(Exception):
    """The server is busy, starting or gone."""

    def __init__(self, reason: str, rest: float | None = None) -> None:
        super().__init__(reason)
        self.rest = rest  # seconds that it asks for


@dataclass
class _Server:
    url: str
    num_in_flight: int = 0
    num_failures: int = 0  # in a row
    failed_at: float = 0.0
    rests_until: float = 0.0


class Endpoints:
    """Servers of one model.

    A request goes to the server with the fewest in flight. One that fails rests for a time that
    doubles with every failure in a row, times a random factor so that clients do not come back
    together; the request goes to another, or waits. When none has answered for `patience_s`,
    ServerError says so.

    Args:
        say: told when servers fall silent.
        rng: of the random factor.
    """

    def __init__(
        self, config: ServerConfig, say: Callable[[str], None], rng: random.Random | None = None
    ) -> None:
        self.config, self.say = config, say
        self.rng = rng or random.Random()
        self._servers = [_Server(url.rstrip("/")) for url in config.urls]
        self._key = os.environ.get(config.api_key_env, "") if config.api_key_env else ""
        self._client: httpx2.AsyncClient
        self._silent_since: float | None = None

    @property
    def num_in_flight(self) -> int:
        """Requests that all servers together take at a time."""
        return self.config.in_flight * len(self._servers)

    def map(self, ask: Callable[[T], Awaitable[R]], tasks: Iterable[T]) -> Iterator[R]:
        """Results of `ask`, which calls `get` and `post`, as they come. The first error ends it,
        after the results that were there.
        """
        waiting = iter(tasks)
        pending: set[asyncio.Task[R]] = set()
        with asyncio.Runner() as runner:
            self._client = httpx2.AsyncClient(
                headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                timeout=httpx2.Timeout(self.config.timeout_s, connect=10.0),
                limits=httpx2.Limits(max_connections=None),
            )
            try:
                while True:
                    new = list(islice(waiting, self.num_in_flight - len(pending)))
                    if not new and not pending:
                        return
                    done, pending = runner.run(_some(ask, new, pending))
                    failed = [task for task in done if task.exception() is not None]
                    for task in done - set(failed):
                        yield task.result()
                    for task in failed:
                        task.result()
            finally:
                runner.run(_cancel(pending))
                runner.run(self._client.aclose())

    async def get(self, path: str) -> Any:
        """The JSON at a path of one of the servers."""
        return await self._until_answered("GET", path, None, lambda tree: tree)

    async def post(self, path: str, body: dict[str, Any], read: Callable[[Any], R]) -> R:
        """What `read` makes of the JSON that answers; it raises Broken for what is no answer.

        Raises Refused for a request that the server does not take, ServerError when none answers.
        """
        return await self._until_answered("POST", path, body, read)

    async def _until_answered(
        self, method: str, path: str, body: dict[str, Any] | None, read: Callable[[Any], R]
    ) -> R:
        num_broken = 0
        while True:
            server = await self._free_server()
            began = _now()
            server.num_in_flight += 1
            try:
                found = read(await self._send(method, server.url + path, body))
            except _Later as failed:
                self._failed(server, str(failed), began, failed.rest)
            except Broken as failed:
                num_broken += 1
                if num_broken == ATTEMPTS:
                    raise ServerError(
                        f"{server.url}{path}: {failed}, {ATTEMPTS} times in a row. Look at the"
                        " server's own messages; the same command goes on from here."
                    ) from None
                self._failed(server, str(failed), began, None)
            else:
                server.num_failures = 0
                self._silent_since = None
                return found
            finally:
                server.num_in_flight -= 1

    async def _send(self, method: str, url: str, body: dict[str, Any] | None) -> Any:
        try:
            response = await self._client.request(method, url, json=body)
        except httpx2.TransportError as failed:
            raise _Later(f"{type(failed).__name__} {failed}".strip()) from None
        status = response.status_code
        if status in LATER:
            raise _Later(f"HTTP {status}", _seconds(response.headers.get("Retry-After")))
        if status >= 500:
            raise Broken(f"HTTP {status} ({self._own_words(response.text)})")
        if status >= 400:
            way_out = {
                401: "Set generate.server.api_key_env to the environment variable of its key",
                403: "Set generate.server.api_key_env to the environment variable of its key",
                404: "Correct generate.server.urls or generate.server.model",
            }.get(status, "Change what it names, here or where the server is started")
            raise Refused(f"{url}: HTTP {status} ({self._own_words(response.text)}). {way_out}.")
        try:
            return response.json()
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise Broken(f"no JSON ({self._own_words(response.text)})") from None

    def _own_words(self, text: str) -> str:
        try:
            error = json.loads(text)["error"]
            text = error["message"] if isinstance(error, dict) else str(error)
        except (ValueError, TypeError, KeyError):
            pass
        text = " ".join(text.split())[:SHOWN]
        return text.replace(self._key, "[key]") if self._key else text

    async def _free_server(self) -> _Server:
        while True:
            now = _now()
            ready = [server for server in self._servers if server.rests_until <= now]
            least = min(ready, key=lambda server: server.num_in_flight, default=None)
            if least is not None and least.num_in_flight < self.config.in_flight:
                return least
            rest = min(server.rests_until for server in self._servers) - now
            await asyncio.sleep(max(rest, 0.02))

    def _failed(self, server: _Server, reason: str, began: float, rest: float | None) -> None:
        """Let a server rest. What was under way when it failed tells nothing new."""
        now, patience = _now(), self.config.patience_s
        if began >= server.failed_at:
            server.num_failures += 1
            server.failed_at = now
            pause = min(LONGEST_REST, FIRST_REST * 2 ** (server.num_failures - 1))
            server.rests_until = now + (pause * self.rng.uniform(0.5, 1) if rest is None else rest)
            if server.num_failures == 2:
                self.say(
                    f"generate: {server.url} does not answer ({reason}); asking again, for up to"
                    f" {patience:.0f} s."
                )
        if self._silent_since is None:
            self._silent_since = now
        if now - self._silent_since > patience:
            raise ServerError(
                f"generate.server.urls={[each.url for each in self._servers]}: no answer for"
                f" {patience:.0f} s ({reason}). What is recorded is kept: start the server, and the"
                " same command goes on from there."
            )


async def _some(
    ask: Callable[[T], Awaitable[R]], new: Iterable[T], pending: set[asyncio.Task[R]]
) -> tuple[set[asyncio.Task[R]], set[asyncio.Task[R]]]:
    async def run(task: T) -> R:
        return await ask(task)

    return await asyncio.wait(
        pending | {asyncio.create_task(run(task)) for task in new},
        return_when=asyncio.FIRST_COMPLETED,
    )


async def _cancel(pending: set[asyncio.Task[R]]) -> None:
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _seconds(header: str | None) -> float | None:
    try:
        return min(max(float(header or ""), 0.0), 120.0)
    except ValueError:
        return None
