"""Pushing: the real huggingface_hub client and a Hub on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

from conf.groups import HubConfig
from conf.run import Run
from models.publish import PublishError, push
from tests.stand_in_hub import StandInHub, stand_in_hub
from tests.tiny import write_tiny_run

# huggingface_hub/lfs.py uploads by `data=`, which its HTTP library deprecates; no issue there yet
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

ROOT = Path(__file__).parents[2]
# these look like tokens and are none; the tests look for leaks of them
TOKEN = "hf_" + "StandInTokenOfMe" * 2
OTHER_TOKEN = "hf_" + "StandInTokenOfAnother" * 2


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return write_tiny_run(tmp_path / "run")


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    with stand_in_hub({TOKEN: {"me"}, OTHER_TOKEN: {"another"}}) as server:
        yield server


@pytest.fixture
def online(hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandInHub:
    """The real client of this process speaks to the stand-in, with the token of `me`."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    return hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Something to push that is not a model: a small and a large text file, binary, a subfolder."""
    folder = tmp_path / "published"
    (folder / "extra").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Draft\n")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    (folder / "tokenizer.json").write_text("é" * 2000, encoding="utf-8")
    (folder / "extra" / "empty.txt").touch()
    return folder


PROGRAM = """
import json, sys
from pathlib import Path
from conf.run import Run
from conf.groups import HubConfig, TargetConfig
from conf.schema import Config
from models.publish import publish
from tests.e2e.test_publish import Recorder

folder = Path(sys.argv[1])
config = Config(
    target=TargetConfig(path="somebody/tiny-target"),
    hub=HubConfig(push=True, repo_id="me/tiny-draft", private=sys.argv[2] == "private"),
)
run, recorder = Run(folder, folder / ".store", 7, "tiny"), Recorder()
for _ in range(2):
    publish(config, run, recorder)
(folder / "log.json").write_text(json.dumps([recorder.messages, recorder.events]))
"""


@pytest.mark.parametrize("visibility", ["private", "public"])
def test_the_stage_pushes_one_commit_byte_for_byte(
    run: Run, hub: StandInHub, visibility: str
) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    environment.update(
        HF_ENDPOINT=hub.url,
        HF_TOKEN=TOKEN,
        HF_HUB_DISABLE_XET="1",
        HF_HUB_OFFLINE="0",
        HF_HOME=str(run.folder / "home"),
        HF_HUB_VERBOSITY="debug",  # whatever the client can say must not hold the token either
        PYTHONPATH=str(ROOT),
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(run.folder), visibility],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    commits = hub.commits("me/tiny-draft")
    assert [commit.title for commit in commits] == [
        "initial commit",
        "Draft tiny with its report",
    ]
    files = dict(commits[-1].files)
    del files[".gitattributes"]
    assert files == contents(run.folder / "published")
    assert hub.repositories["me/tiny-draft"].private is (visibility == "private")
    assert sum("/commit/" in request for request in hub.requests) == 1
    log = (run.folder / "log.json").read_text()
    assert f"{hub.url}/me/tiny-draft: in one commit" in log
    assert "already holds exactly these files: no commit made" in log
    assert TOKEN not in done.stdout + done.stderr
    assert "authenticated: True" in done.stderr  # the debug log really was on
    _no_token_below(run.folder)


def _no_token_below(folder: Path) -> None:
    for name, content in contents(folder).items():
        assert TOKEN.encode() not in content, name


def test_only_what_changed_is_committed_and_the_rest_stays(
    online: StandInHub, folder: Path
) -> None:
    online.add("me/draft", private=True, files={"draft.gguf": b"made by hand"})
    settings = HubConfig(push=True, repo_id="me/draft")
    first = push(folder, settings, title="first")
    assert first.is_new
    assert first.others == ["draft.gguf"]
    again = push(folder, settings, title="again")
    assert (again.is_new, again.commit) == (False, first.commit)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Better\n")
    assert push(folder, settings, title="better").is_new
    titles = [commit.title for commit in online.commits("me/draft")]
    assert titles == ["initial commit", "first", "better"]
    head = online.commits("me/draft")[-1].files
    assert head == {
        **contents(folder),
        "draft.gguf": b"made by hand",
        ".gitattributes": head[".gitattributes"],
    }
    assert sum(request.startswith("PUT /objects/") for request in online.requests) == 2


def test_another_revision_leaves_main_alone(online: StandInHub, folder: Path) -> None:
    settings = HubConfig(push=True, repo_id="me/draft", revision="v2")
    push(folder, settings, title="second version")
    assert len(online.commits("me/draft", "main")) == 1
    assert len(online.commits("me/draft", "v2")) == 2


def _refusal(folder: Path, caplog: pytest.LogCaptureFixture, **hub: Any) -> str:
    settings = HubConfig(**{"push": True, "repo_id": "me/draft", **hub})
    with caplog.at_level("DEBUG"), pytest.raises(PublishError) as caught:
        push(folder, settings, title="refused")
    text = str(caught.value)
    assert "\n" not in text
    # `raise ... from None`: a printed traceback shows this sentence and not the client's error
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    for token in (TOKEN, OTHER_TOKEN):
        assert token not in text + caplog.text
    return text


@pytest.mark.parametrize(
    ("token", "sentence"),
    [
        ("", "there is no Hugging Face token. Run `hf auth login`, or set HF_TOKEN"),
        (
            "hf_" + "mistyped" * 4,
            "the Hub refused the token, which is mistyped, expired or revoked",
        ),
        (OTHER_TOKEN, "this token may not write there. Use a repository of your own"),
    ],
)
@pytest.mark.parametrize("exists", [False, True])
def test_a_token_that_will_not_do(
    online: StandInHub,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    token: str,
    sentence: str,
    exists: bool,
) -> None:
    if exists:
        online.add("me/draft", private=True)
    monkeypatch.setenv("HF_TOKEN", token)
    text = _refusal(folder, caplog)
    assert sentence in text
    assert "mistypedmistyped" not in text + caplog.text
    if not token:
        assert not online.requests


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_out_of_order(
    online: StandInHub, folder: Path, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    online.fail_with = status
    text = _refusal(folder, caplog)
    assert f"status {status}" in text
    assert f"The folder stays in {folder}, and the same command tries again." in text


def test_no_network(
    online: StandInHub,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://someone:{TOKEN}@127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", nobody)
    text = _refusal(folder, caplog)
    assert "127.0.0.1 cannot be reached. Check network, proxy and HF_ENDPOINT." in text
    assert not online.requests


def test_offline_mode(
    online: StandInHub,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set, so the Hub cannot be reached" in _refusal(folder, caplog)
    assert not online.requests


def test_a_private_draft_does_not_go_to_a_public_repository(
    online: StandInHub, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    online.add("me/draft", private=False)
    assert "me/draft exists and is public" in _refusal(folder, caplog)
    assert len(online.commits("me/draft")) == 1
    push(folder, HubConfig(push=True, repo_id="me/draft", private=False), title="public")
    assert len(online.commits("me/draft")) == 2


def test_a_card_that_the_hub_refuses(
    online: StandInHub, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "README.md").write_text("---\nlicense: unheard-of\n---\n")
    text = _refusal(folder, caplog)
    assert "license is not a known one, (token)" in text
    assert len(online.commits("me/draft")) == 1


def test_a_file_that_the_repository_ignores_is_missed(
    online: StandInHub, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    online.add("me/draft", private=True, files={".gitignore": b"tokenizer.json\n"})
    assert "the Hub left out tokenizer.json" in _refusal(folder, caplog)


def test_a_commit_in_between_is_not_overwritten(
    online: StandInHub,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    online.add("me/draft", private=True)
    real = HfApi.create_commit

    def after_somebody_else(self: HfApi, *args: Any, **kwargs: Any) -> Any:
        commits = online.commits("me/draft")
        commits.append(type(commits[0])("by hand", {"README.md": b"by hand"}, commits[-1].sha))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(HfApi, "create_commit", after_somebody_else)
    assert "somebody else changed the repository meanwhile" in _refusal(folder, caplog)
    assert online.commits("me/draft")[-1].title == "by hand"
