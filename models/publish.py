"""Publishing: the draft as a transformers folder with its evidence, pushed when asked for.

This is the only module that uploads anything, and it does so only for `hub.push=true`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, constants, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id

from conf.contracts import MANIFEST, Corpus, Draft, Lessons, Manifest, Report
from conf.errors import ConfigError, require
from conf.groups import HubConfig
from conf.run import Run, process_rank, write_atomically
from conf.schema import Config
from models.card import Publication, model_card
from models.loadable import verify_loadable

if TYPE_CHECKING:
    from conf.tracking import Tracker

CARD = "README.md"
REPORT = "report.json"
TOKEN_LIKE = re.compile(r"\bhf_[A-Za-z0-9]{20,}")


class PublishError(ConfigError):
    """A draft that cannot be published. The message gives the way out and never holds a token."""


@dataclass(frozen=True)
class Pushed:
    """What the Hub holds now. `is_new` is false when it held exactly these files before."""

    url: str
    commit: str
    is_new: bool
    others: list[str]  # files of the repository that this folder does not have


def publish(config: Config, run: Run, tracker: Tracker) -> Path:
    """Write `published/`, verify it, push it in one commit if `hub.push=true`; return the folder.

    Under a launcher only process 0 does anything. Raises ContractError when distill or evaluate
    has not finished, ConfigError (UnfitDraft, PublishError) when the folder is not what it must be
    or the Hub refuses it.
    """
    folder, hub = run.folder / "published", config.hub
    if process_rank() != 0:
        return folder
    require(
        not hub.push or bool(hub.repo_id),
        "hub.push",
        hub.push,
        "pushing needs a repository",
        "Set hub.repo_id=owner/name",
    )
    write(config, run, folder)
    files = _files(folder)
    size = sum(path.stat().st_size for path in files.values())
    tracker.event("publish", {"files": len(files), "bytes": size})
    tracker.message(f"Verified: {folder} ({len(files)} files, {size / 2**20:.1f} MiB)")
    if not hub.push:
        tracker.message(_how_to_push(config))
        return folder
    pushed = push(folder, hub, title=f"Draft {run.name} with its report")
    how = "in one commit" if pushed.is_new else "already holds exactly these files: no commit made"
    tracker.event("publish", {"commit": pushed.commit, "new_commit": pushed.is_new})
    tracker.message(f"{pushed.url}: {how}")
    if pushed.others:
        tracker.message(f"Left there as they were: {', '.join(pushed.others)}")
    return folder


def _how_to_push(config: Config) -> str:
    visibility = "private" if config.hub.private else "public"
    command = f"python -m train stage=publish name={config.name} hub.push=true"
    command += f" hub.repo_id={config.hub.repo_id or 'OWNER/NAME'}"
    if not base_model(config):
        command += " hub.base_model=OWNER/TARGET"
    return f"Nothing was pushed. This pushes it to a {visibility} repository: {command}"


# ---------------------------------------------------------------- the folder


def write(config: Config, run: Run, folder: Path) -> None:
    """Write weights, tokenizer, card, report and plots into `folder`, verified.

    The folder gets its name only when everything holds; an older one is replaced. Raises
    ContractError without a draft or a report, ConfigError when they do not fit or do not load.
    """
    draft, report = Draft.read(run.draft), Report.read(run.report)
    if draft.shared_vocab:
        raise PublishError(
            f"{run.draft} is {draft.determined_by['draft']['pretrained']} as it was"
            " (draft.vocab=shared): nothing was trained, so there is nothing to publish. Distil a"
            " draft of the target's tokenizer."
        )
    measured = report.draft.get("parameters")
    if measured != draft.parameters:
        raise PublishError(
            f"{run.report} is about a draft of {measured} parameters, {run.draft} has "
            f"{draft.parameters}. Remove {run.report} and run stage=evaluate for this draft."
        )
    for leftover in folder.parent.glob(f".{folder.name}.*.tmp"):  # of a killed process
        shutil.rmtree(leftover)
    work = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        shutil.copytree(run.draft / "model", work)
        plots = sorted(run.report.glob("*.png"))
        for plot in plots:
            shutil.copy2(plot, work / plot.name)
        evidence = run.report / REPORT
        shutil.copy2(evidence if evidence.is_file() else run.report / MANIFEST, work / REPORT)
        publication = Publication(
            target=_target_name(config, report),
            base_model=base_model(config),
            repo_id=config.hub.repo_id,
            license=config.hub.license,
            plots=[plot.name for plot in plots],
        )
        card = model_card(report, draft, _recipe(run, draft, report), publication)
        write_atomically(work / CARD, card)
        verify_card(card, needs_base_model=config.hub.push)
        _verify_no_token(work)
        verify_loadable(work, report.target["vocab_size"])
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def base_model(config: Config) -> str:
    """The target's id on the Hub: `hub.base_model`, or `target.path` where that is one; else empty.

    A local folder, a GGUF file and a file inside a package have no id that could be derived.
    """
    target = config.target
    if config.hub.base_model:
        return config.hub.base_model
    if target.package or target.gguf or Path(target.path).exists():
        return ""
    return target.path if _is_repo_id(target.path) else ""


def _target_name(config: Config, report: Report) -> str:
    # of a path only the last part: a card does not tell where somebody keeps their files
    named = str(report.target.get("name") or config.target.path)
    return base_model(config) or Path(named).name


def _recipe(run: Run, draft: Draft, report: Report) -> dict[str, Any]:
    """The configuration that made this draft, from the manifests: today's may differ from it."""
    made: list[Manifest] = [draft, report]
    # a draft may have been carried here without them; then the card says less
    if (run.lessons / MANIFEST).is_file():
        made.insert(0, Lessons.read(run.lessons))
    if (run.corpus / MANIFEST).is_file():
        made.insert(0, Corpus.read(run.corpus))
    merged: dict[str, Any] = {}
    for manifest in made:
        for key, value in manifest.determined_by.items():
            old = merged.get(key)
            both = isinstance(old, Mapping) and isinstance(value, Mapping)
            merged[key] = {**old, **value} if both else value  # type: ignore[dict-item]
    return merged


def verify_card(text: str, *, needs_base_model: bool) -> None:
    """Raise PublishError unless the front matter is valid metadata; works without a network."""
    metadata = ModelCard(text).data.to_dict()
    base = str(metadata.get("base_model", ""))
    if not _is_repo_id(base) and (base or needs_base_model):
        raise PublishError(
            f"hub.base_model={base!r}: the card names the target by its id on the Hub, and "
            "target.path gives none. Set hub.base_model=owner/name."
        )
    if not metadata.get("license"):
        raise PublishError("hub.license='': a card needs one. Set for example hub.license=mit.")


def _verify_no_token(folder: Path) -> None:
    for name in (CARD, REPORT):
        if TOKEN_LIKE.search((folder / name).read_text(encoding="utf-8")):
            raise PublishError(
                f"{name} holds what looks like a Hugging Face token, and would publish it. Revoke "
                "that token, then distil and evaluate without it in the command and the data."
            )


def _is_repo_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1


def _files(folder: Path) -> dict[str, Path]:
    """Path in the repository -> file, in a fixed order."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in found}


# ---------------------------------------------------------------- the Hub


def push(folder: Path, hub: HubConfig, *, title: str) -> Pushed:
    """All files of `folder` in one commit of `hub.repo_id`, which is created if absent.

    The token comes from where huggingface_hub looks (HF_TOKEN, `hf auth login`). Files that only
    the repository has stay. Raises PublishError for an absent or refused token, a repository of
    somebody else or more visible than `hub.private` asks for, and no network.
    """
    try:
        if constants.is_offline_mode():
            raise OfflineModeIsEnabled
        if get_token() is None:
            raise PublishError(
                "hub.push=true: there is no Hugging Face token. Run `hf auth login`, or set "
                f"HF_TOKEN to a token that may write to {hub.repo_id}."
            )
        return _push(HfApi(library_name="draftsmith"), folder, hub, title)
    except PublishError:
        raise
    except (HTTPError, OSError, RuntimeError, ValueError) as failure:
        _explain(failure, hub, folder)


def _push(api: HfApi, folder: Path, hub: HubConfig, title: str) -> Pushed:
    files = _files(folder)
    api.create_repo(hub.repo_id, private=hub.private, exist_ok=True)
    # an existing repository keeps its visibility, whatever create_repo was told
    if hub.private and api.model_info(hub.repo_id).private is False:
        raise PublishError(
            f"hub.private=true: {hub.repo_id} exists and is public. Set hub.private=false to "
            "publish there, or choose another hub.repo_id."
        )
    if hub.revision != constants.DEFAULT_REVISION:
        api.create_branch(hub.repo_id, branch=hub.revision, exist_ok=True)
    before = api.model_info(hub.repo_id, revision=hub.revision)
    commit = api.create_commit(
        hub.repo_id,
        [CommitOperationAdd(path_in_repo=name, path_or_fileobj=at) for name, at in files.items()],
        commit_message=title,
        revision=hub.revision,
        parent_commit=before.sha,  # somebody's commit in between is refused, not overwritten
    )
    there = api.model_info(hub.repo_id, revision=hub.revision).siblings or []
    names = {file.rfilename for file in there}
    if lost := sorted(files.keys() - names):
        raise PublishError(
            f"hub.repo_id={hub.repo_id}: the Hub left out {', '.join(lost)}. Remove these names "
            "from the .gitignore of the repository and push again."
        )
    return Pushed(
        url=f"{api.endpoint}/{hub.repo_id}",
        commit=commit.oid,
        is_new=commit.oid != before.sha,
        others=sorted(names - files.keys() - {".gitattributes"}),
    )


def _explain(failure: Exception, hub: HubConfig, folder: Path) -> NoReturn:
    """Raise the one sentence for a failed push, `from None`: the client quotes the server."""
    answers = (e.response.status_code for e in _chain(failure) if isinstance(e, HfHubHTTPError))
    status = next(answers, None)
    key = f"hub.repo_id={hub.repo_id}"
    again = f"The folder stays in {folder}, and the same command tries again."
    if isinstance(failure, OfflineModeIsEnabled):
        text = "hub.push=true: HF_HUB_OFFLINE is set, so the Hub cannot be reached. Unset it."
    elif status in _REFUSALS:
        text = f"{key}: {_REFUSALS[status]}"
    elif status is not None:
        # only for 400 does the server's text help: it says what is wrong with the card
        said = f" ({_redacted(str(failure))})" if status == 400 else ""
        text = f"{key}: the Hub answered with status {status}{said}. {again}"
    elif isinstance(failure, HTTPError | OSError):
        host = urlsplit(constants.ENDPOINT).hostname  # a proxy's password may stand before it
        text = f"{key}: {host} cannot be reached. Check network, proxy and HF_ENDPOINT. {again}"
    else:
        *_, cause = _chain(failure)
        text = f"{key}: the upload failed ({_redacted(str(cause))}). {again}"
    raise PublishError(text) from None


_REFUSALS = {
    401: "the Hub refused the token, which is mistyped, expired or revoked. Make one that may "
    "write at https://huggingface.co/settings/tokens; run `hf auth login` or set HF_TOKEN to it.",
    403: "this token may not write there. Use a repository of your own, or a token with write "
    "permission for that owner.",
    404: "the repository or hub.revision is not there. Check both and push again.",
    409: "somebody else changed the repository meanwhile. Look at it and push again.",
    412: "somebody else changed the repository meanwhile. Look at it and push again.",
}


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    # a failed upload thread wraps the answer of the Hub in a RuntimeError
    while error is not None:
        yield error
        error = error.__cause__


def _redacted(text: str) -> str:
    token = get_token()
    shown = text.replace(token, "(token)") if token else text
    return " ".join(TOKEN_LIKE.sub("(token)", shown).split())
