"""The W&B run of a run folder: online where there are credentials, offline otherwise, never a
question and never a reason to stop.
"""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from conf.events import EVENTS
from conf.run import Run, write_atomically
from conf.schema import Config, as_tree

if TYPE_CHECKING:
    import wandb

WANDB_ID = "wandb_id"
ONLINE_SECONDS = 60  # to wait for W&B's server at the start, and for each artifact to link to
FINISH_SECONDS = 120  # to wait for uploads at the end


def start_wandb(config: Config, run: Run, say: Callable[[str], None]) -> wandb.Run | None:
    """The W&B run of this folder, continued if there is one; None, and a sentence, without it."""
    try:
        import wandb

        mode, why = _mode()
        if mode == "disabled":
            say(f"W&B is off ({why}).")
            return None
        try:
            tracked = _init_wandb(config, run, mode)
        except wandb.Error as refused:
            if mode == "offline":
                raise
            mode, why = "offline", f"the server did not accept the run, {reason_of(refused)}"
            wandb.teardown()  # the refused run holds its id until its service is gone
            tracked = _init_wandb(config, run, mode)
    except Exception as failure:  # not installed, disk full, no service: the run does not need it
        say(
            f"W&B could not start ({reason_of(failure)}). The run goes on: the console and"
            f" {EVENTS} have everything; tracker=none says nothing of W&B."
        )
        return None
    if mode == "offline":
        # the pattern also takes what interrupted commands recorded; wandb sync orders the parts
        lies = Path(tracked.dir).parent
        parts = f"{shlex.quote(str(lies.parent))}/offline-run-*-{tracked.id}"
        say(f"W&B is offline ({why}). The run lies in {lies}")
        say(f"To upload it: wandb sync {parts}")
    return tracked


def _init_wandb(config: Config, run: Run, mode: str) -> wandb.Run:
    import wandb

    identity = run.folder / WANDB_ID
    if not identity.is_file():
        write_atomically(identity, secrets.token_hex(4))
    return wandb.init(
        project=config.tracker.project,
        entity=config.tracker.entity or None,
        name=run.name,
        tags=list(config.tracker.tags),
        config=as_tree(config),
        dir=run.folder,
        id=identity.read_text("utf-8").strip(),
        resume="allow",
        mode=mode,  # type: ignore[arg-type]
        reinit="create_new",  # never the run that other code here may have open
        settings=_settings(),
    )


def _settings() -> wandb.Settings:
    """Quiet, no capture of the console (rich draws on it), nothing that waits without end."""
    import wandb

    return wandb.Settings(
        silent=True,
        quiet=True,
        console="off",
        disable_job_creation=True,
        init_timeout=ONLINE_SECONDS,
        finish_timeout=FINISH_SECONDS,
    )


def _mode() -> tuple[str, str]:
    """W&B's mode and the reason. Reads the environment, wandb's settings and the netrc file only.

    wandb.init itself would ask a person without credentials a question, so it is never reached
    in an online mode without them.
    """
    import wandb
    from wandb.sdk.lib import wbauth

    settings = wandb.setup(_settings()).settings
    asked = os.environ.get("WANDB_MODE")
    mode = asked or settings.mode
    why = f"WANDB_MODE={asked}" if asked else "wandb's settings say so"
    if mode in ("disabled", "offline", "dryrun"):
        return "disabled" if mode == "disabled" else "offline", why
    try:
        credentials = wbauth.authenticate_session(
            host=settings.base_url, source="draftsmith", prompt=False, update_session=False
        )
    except wandb.errors.AuthenticationError as broken:
        return "offline", reason_of(broken)
    return (mode, why) if credentials else ("offline", "not logged in")


def reason_of(failure: Exception) -> str:
    """What an exception says, in one line."""
    text = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {text[:200]}" if text else type(failure).__name__
