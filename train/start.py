"""The draft before its first step: built and, where it has layers of the target, warm started.

The ridge regression of `models.draft.warm_start` hits the target's hidden states on average; which
of its errors cost acceptance only the laws know. So its map may then be fitted to them
(`draft.fit_steps`). While the layers stay as they are that is a matrix: positions are read once,
and a step costs what the head costs.
"""

# N supervised positions, n of a step, D features of the body, E of the head

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from conf.choices import Divergence, DraftInit
from conf.contracts import Lessons
from conf.errors import require
from conf.groups import ObjectiveConfig
from conf.schema import Config
from conf.tracking import Tracker
from data.batches import collate
from data.shards import Row
from models.draft import DraftModel, choose_layers, fit_vocabulary, from_layers, warm_start
from models.load import Target, load_folder, load_model, stored_dtype
from models.packed import hidden_states
from models.vocab import require_same_tokenizer
from train.head import Head
from train.objectives import objective
from train.processes import agree_on
from train.states import recorded_or_computed
from train.validation import packs

NOT_THE_HEAD = {"cross_entropy": False, "fused_linear_cross_entropy": False}  # of Liger's kernels
POSITIONS = 512  # of a step
MOST_POSITIONS = 32768  # read in all: about two for each of a step's with 128 steps
RATE = 1e-3  # of a step, relative to the size of what the head reads
DAMPING = 1e-2  # of the whitening, relative to the mean variance


def build(config: Config, target: Target, device: torch.device) -> tuple[DraftModel, list[int]]:
    """The draft before any training, and the target's layers in it.

    Raises ConfigError when kernels are asked for that the device cannot run.
    """
    require(
        not config.runtime.liger or device.type == "cuda",
        "runtime.liger",
        True,
        f"its kernels run on a GPU, and this is {device.type}",
        "Leave the key out",
    )
    if config.draft.init is DraftInit.pretrained:
        name = config.draft.pretrained
        tokenizer = AutoTokenizer.from_pretrained(name)
        require_same_tokenizer(tokenizer, target.tokenizer, name, config.target.path)
        small = load_folder(name, dtype=torch.float32, device=device)
        plain = fit_vocabulary(small, target.config.vocab_size)
        layers: list[int] = []
    else:
        stored = stored_dtype(config.target, device)
        full = load_model(target, config.target, torch.device("cpu"), stored)
        layers = choose_layers(config.draft, target.config.num_hidden_layers)
        plain = from_layers(full, layers)
        nn.Module.to(plain, device)
        del full
    if config.runtime.liger:
        # it brings peft along, which other drafts need not wait for and hold
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(plain, NOT_THE_HEAD)
    model = DraftModel(plain)
    if not config.draft.train_embeddings:
        model.freeze_embeddings()
    return model, layers


def warm_up(
    config: Config,
    target: Target,
    lessons: Lessons,
    model: DraftModel,
    head: Head,
    train: Sequence[Row],
    tracker: Tracker,
) -> None:
    """The warm start, where the configuration asks for it: ridge regression, then the laws."""
    if config.draft.init is not DraftInit.layers or not config.draft.warm_start:
        return
    states = recorded_or_computed(config, target, lessons, train)
    count = warm_start(model, states, config.draft.ridge)
    tracker.message(f"distill: warm start from {count} hidden states of the target.")
    fitted = fit_map(model, head, train, num_steps=config.draft.fit_steps, seed=config.seed)
    if fitted:
        tracker.message(f"distill: its map is fitted to the laws of {fitted} positions.")
    agree_on(model.map.weight)


# ---------------------------------------------------------------- the map


@torch.no_grad()
def fit_map(
    model: DraftModel, head: Head, rows: Sequence[Row], *, num_steps: int, seed: int
) -> int:
    """Fit the map to the laws of the first answers by Adam. Returns the positions used.

    Minimised is the mean of -log sum min(p, q) (lk_alpha), of cross-entropy where no laws were
    recorded. W = W0 + s V P with V from 0, P = (X'X / N + damping)^-1/2 and s the root mean square
    of W0 x: in the coordinates V features are uncorrelated and of variance 1, so that one rate
    suits every family of models. The rate falls linearly to zero.
    """
    chosen = first_answers(rows, MOST_POSITIONS)
    if not chosen or num_steps < 1:
        return 0
    seen = all(row.top_ids.shape[1] for row in chosen)
    divergence = Divergence.lk_alpha if seen else Divergence.cross_entropy
    minimised = objective(ObjectiveConfig(divergence=divergence), 0.0)
    device = head.weight_HE.device
    model.eval()
    x_ND = torch.cat(
        [
            hidden_states(model.full[0], batch)[0, batch.supervised_N].float()
            for batch in (collate(pack).to(device) for pack in packs(chosen))
        ]
    )
    laws = collate(chosen).to(device)
    start_ED = model.map.weight.detach().clone()
    whitening_DD = _whitening(x_ND) * (x_ND @ start_ED.T).pow(2).mean().sqrt()
    moved_ED = torch.nn.Parameter(torch.zeros_like(start_ED))
    adam = torch.optim.Adam([moved_ED], lr=RATE, betas=(0.9, 0.95))
    rng = torch.Generator().manual_seed(seed)
    for step, numbers_n in enumerate(_batches(len(x_ND), num_steps, rng)):
        chosen_n = numbers_n.to(device)
        x_nD = x_ND[chosen_n]
        features_nE = x_nD @ model.map.weight.T
        with torch.enable_grad():  # of the loss in the features
            _, gradient_nE = head.backward(
                features_nE, laws.supervise(chosen_n), minimised, scale=1 / len(x_nD), rng=rng
            )
        moved_ED.grad = gradient_nE.T @ x_nD @ whitening_DD
        adam.param_groups[0]["lr"] = RATE * (1 - step / num_steps)
        adam.step()
        model.map.weight.copy_(start_ED + moved_ED @ whitening_DD)
    return len(x_ND)


def first_answers(rows: Sequence[Row], num_positions: int) -> list[Row]:
    """From the first on until they have so many positions, without their prompts' laws."""
    chosen: list[Row] = []
    count = 0
    for row in rows:
        if count >= num_positions:
            break
        chosen.append(row.of_answer())
        count += chosen[-1].num_laws
    return chosen


def _whitening(x_ND: Tensor) -> Tensor:
    """The symmetric inverse root of the damped second moments, DD."""
    values_D, vectors_DD = torch.linalg.eigh((x_ND.T @ x_ND / len(x_ND)).double())
    damped_D = values_D.clamp(min=0) + DAMPING * values_D.mean()
    return ((vectors_DD * damped_D.rsqrt()) @ vectors_DD.T).to(x_ND)


def _batches(count: int, num_steps: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Positions of each step, every one once before any comes again."""
    order = torch.empty(0, dtype=torch.long)
    for _ in range(num_steps):
        if len(order) < POSITIONS:
            order = torch.cat([order, torch.randperm(count, generator=rng)])
        yield order[:POSITIONS]
        order = order[POSITIONS:]
