"""Requests are answered once each, whatever the servers do, or one sentence says why not."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from conf.server import ServerConfig
from models.endpoints import ATTEMPTS, Broken, Endpoints, Refused, ServerError
from tests.stand_in_api import Body, Failure, StandInApi, stand_in_api


def double(_path: str, body: Body) -> Body:
    return {"twice": 2 * body["number"]}


@pytest.fixture
def api() -> Iterator[StandInApi]:
    with stand_in_api(double) as running:
        yield running


def endpoints(*urls: str, said: list[str] | None = None, **changes: Any) -> Endpoints:
    settings = {"patience_s": 20.0, "timeout_s": 20.0, "in_flight": 4, **changes}
    say = (lambda _: None) if said is None else said.append
    return Endpoints(ServerConfig(urls=list(urls), **settings), say, random.Random(0))


def answers(asked: Endpoints, count: int = 20) -> list[int]:
    def read(tree: Any) -> int:
        if not isinstance(tree.get("twice"), int):
            raise Broken("no number")
        return tree["twice"]

    async def ask(number: int) -> int:
        return await asked.post("/double", {"number": number}, read)

    return sorted(asked.map(ask, range(count)))


RIGHT = [2 * number for number in range(20)]


@pytest.mark.parametrize(
    "failure",
    [
        Failure(429),
        Failure(429, headers={"Retry-After": "0.1"}),
        Failure(503, body="Loading model"),
        Failure(500),
        Failure(0),
        Failure(200, body="no JSON"),
        Failure(200, body='{"twice": "many"}'),
        Failure(200, body=""),
    ],
    ids=str,
)
def test_what_fails_is_asked_again_and_answered_once(api: StandInApi, failure: Failure) -> None:
    api.failures = [failure] * 3
    assert answers(endpoints(api.url)) == RIGHT
    assert len(api.requests) == len(RIGHT) + 3


def test_a_request_that_takes_too_long_is_asked_again(api: StandInApi) -> None:
    api.failures = [Failure(200, body='{"twice": 1}', seconds=1.0)]
    assert answers(endpoints(api.url, timeout_s=0.3)) == RIGHT
    assert len(api.requests) == len(RIGHT) + 1


def test_a_server_may_say_when_to_come_back(api: StandInApi) -> None:
    api.failures = [Failure(429, headers={"Retry-After": "0.6"})]
    start = time.monotonic()
    answers(endpoints(api.url, in_flight=1), 1)
    assert 0.6 <= time.monotonic() - start < 5


def test_pauses_grow_and_differ_by_chance(api: StandInApi) -> None:
    api.failures = [Failure(503)] * 4
    start = time.monotonic()
    answers(endpoints(api.url, in_flight=1), 1)
    # 0.25, 0.5, 1 and 2 seconds, each times one half to one
    assert 3.75 / 2 <= time.monotonic() - start < 3.75 + 2


def test_many_are_under_way_and_no_more_than_allowed() -> None:
    def slowly(path: str, body: Body) -> Body:
        time.sleep(0.05)
        return double(path, body)

    with stand_in_api(slowly) as first, stand_in_api(slowly) as second:
        assert answers(endpoints(first.url, second.url, in_flight=3)) == RIGHT
        assert first.most_at_once == second.most_at_once == 3
        assert len(first.requests) + len(second.requests) == len(RIGHT)


def test_a_dead_server_leaves_the_work_to_the_others(api: StandInApi) -> None:
    """Which are asked no more at a time than before."""
    asked = endpoints("http://127.0.0.1:9/v1", api.url, in_flight=2)
    assert answers(asked) == RIGHT
    assert len(api.requests) == len(RIGHT)
    assert api.most_at_once <= 2


def test_servers_that_stay_away_are_given_up_in_a_sentence() -> None:
    said: list[str] = []
    asked = endpoints("http://127.0.0.1:9/v1", said=said, patience_s=0.8)
    with pytest.raises(ServerError, match=r"urls=.*no answer for 1 s .*the same command goes on"):
        answers(asked)
    assert len(said) == 1
    assert "does not answer" in said[0]


def test_answers_that_are_none_are_not_asked_for_without_end(api: StandInApi) -> None:
    api.failures = [Failure(200, body="<html>")] * ATTEMPTS
    with pytest.raises(ServerError, match=rf"no JSON \(<html>\), {ATTEMPTS} times in a row"):
        answers(endpoints(api.url, in_flight=1), 1)


@pytest.mark.parametrize(
    ("status", "way_out"),
    [(400, "Change what it names"), (401, "api_key_env"), (404, "generate.server.model")],
)
def test_a_refused_request_is_not_repeated(api: StandInApi, status: int, way_out: str) -> None:
    api.failures = [Failure(status, body='{"error": {"message": "no such model"}}')]
    with pytest.raises(Refused, match=rf"HTTP {status} \(no such model\)\. .*{way_out}"):
        answers(endpoints(api.url, in_flight=1), 1)
    assert len(api.requests) == 1


def test_a_key_is_sent_and_not_repeated(api: StandInApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-secret")
    api.failures = [Failure(401, body='{"error": {"message": "bad key sk-secret"}}')]
    asked = endpoints(api.url, api_key_env="SOME_KEY", in_flight=1)
    with pytest.raises(Refused, match=r"bad key \[key\]"):
        answers(asked, 1)
    assert api.keys == {"Bearer sk-secret"}


def test_what_was_answered_before_an_error_is_not_lost(api: StandInApi) -> None:
    api.failures = []
    asked = endpoints(api.url, in_flight=1)

    async def ask(number: int) -> int:
        if number == 3:
            raise ServerError("enough")
        return await asked.post("/double", {"number": number}, lambda tree: int(tree["twice"]))

    found = []
    with pytest.raises(ServerError, match="enough"):
        for answer in asked.map(ask, range(9)):
            found.append(answer)
    assert found == [0, 2, 4]
