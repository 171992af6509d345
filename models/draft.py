"""Drafts: made from a few of the target's layers, or from a small model of the same tokenizer.

A draft in training is a transformers body, a square map W and a frozen head E: logits = E W x with
x the normalised output of the body. On export W is folded into the head, so every engine sees a
plain untied language model.
"""

# T packed positions, N supervised ones, D hidden dimension of the draft, E of its head,
# V vocabulary, H hot ids, K readings of the same positions

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from conf.choices import LayerRule
from conf.errors import ConfigError
from conf.groups import DraftConfig
from data.batches import Batch
from data.shards import Row
from models.anatomy import with_layers
from models.decoding.routing import decoder_layers
from models.lora import merged
from models.packed import hidden_states, pack_attention

HOT_VOCAB = "hot_vocab.json"


class DraftModel(nn.Module):
    """A draft being trained. Calling it gives what the frozen head reads, shape 1TE."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        head = model.get_output_embeddings()
        self.config = model.config
        self.head = head.weight.detach()  # V E, neither trained nor part of the state
        if head.weight is model.get_input_embeddings().weight:
            self.head = self.head.clone()  # the embeddings may be trained
        self.body = model.base_model
        self.map = nn.Linear(
            head.in_features, head.in_features, bias=False, device=head.weight.device
        )
        nn.init.eye_(self.map.weight)
        pack_attention(model)
        self.full = [model]  # in a list: a submodule would register the body twice

    def forward(self, batch: Batch) -> Tensor:
        """Features of every packed position; attention stays inside each answer."""
        return self.map(hidden_states(self.full[0], batch))

    def freeze_embeddings(self) -> None:
        """Leave the input embeddings as they are. They and the head, the largest tables of a small
        draft, are then kept in bfloat16 where that loses nothing, and once where they are tied.
        """
        embeddings = self.full[0].get_input_embeddings()
        embeddings.requires_grad_(False)
        if self.full[0].get_output_embeddings().weight is embeddings.weight:
            self.head = embeddings.weight.detach()
        # a subclass may compute with its table; a lookup does not
        if type(embeddings) is not nn.Embedding or not _is_bfloat16(embeddings.weight):
            return
        embeddings.weight.data = embeddings.weight.bfloat16()
        embeddings.register_forward_hook(lambda _module, _ids, found: found.float())
        if _is_bfloat16(self.head):
            self.head = self.full[0].get_output_embeddings().weight.detach().bfloat16()
            self.full[0].get_output_embeddings().weight.data = self.head

    def export(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        dtype: torch.dtype,
        hot_ids: Tensor | None,
    ) -> None:
        """Write a plain transformers folder: weights with adapters merged and the map folded into
        an untied head, tokenizer, settings.
        """
        config = copy.deepcopy(self.config)
        config.tie_word_embeddings = False
        config.dtype = dtype
        plain = AutoModelForCausalLM.from_config(config)
        plain.base_model.load_state_dict(merged(self.body))
        with torch.no_grad():
            plain.get_output_embeddings().weight.copy_(self.head.float() @ self.map.weight.float())
        ids = {
            key: getattr(self.full[0].generation_config, key)
            for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        # without a target's sampling settings, which may not even save
        plain.generation_config = GenerationConfig(**ids)
        plain.to(dtype).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if hot_ids is not None:
            write_hot_ids(folder, hot_ids, config.vocab_size)


def _is_bfloat16(weight: Tensor) -> bool:
    """Whether numbers are float32 only by name: bfloat16 would hold them all."""
    return weight.dtype is torch.float32 and torch.equal(weight.bfloat16().float(), weight)


def write_hot_ids(
    folder: Path, ids_H: Tensor, vocab_size: int, target_ids_H: Tensor | None = None
) -> None:
    """Name the ids, of `vocab_size`, that an exported draft proposes, and for one with another
    tokenizer the target's ids of the same tokens.
    """
    content = {"ids": ids_H.tolist(), "vocab_size": vocab_size}
    if target_ids_H is not None:
        content["target_ids"] = target_ids_H.tolist()
    (folder / HOT_VOCAB).write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_hot_ids(folder: str | Path) -> Tensor | None:
    """Ids that the draft of an exported folder proposes; None: all."""
    tree = _read_hot_vocab(folder)
    return None if tree is None else torch.tensor(tree["ids"])


def read_shared_ids(folder: str | Path) -> tuple[Tensor, Tensor] | None:
    """Of an exported draft with another tokenizer, the target's ids and the draft's of the tokens
    it proposes; None: it has the target's tokenizer.
    """
    tree = _read_hot_vocab(folder)
    if tree is None or "target_ids" not in tree:
        return None
    return torch.tensor(tree["target_ids"]), torch.tensor(tree["ids"])


def _read_hot_vocab(folder: str | Path) -> dict[str, Any] | None:
    path = Path(folder) / HOT_VOCAB
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def choose_layers(config: DraftConfig, num_target_layers: int) -> list[int]:
    """Layers of the target that become the draft, in order; where their number is yet to be chosen,
    those of the deepest draft that it may be.
    """
    if config.layers:
        return sorted(config.layers)
    count = config.num_layers or min(config.most_layers, num_target_layers - 1)
    if config.layer_rule is LayerRule.first or count == 1:
        return list(range(count))
    if config.layer_rule is LayerRule.even:
        return sorted({round(i * (num_target_layers - 1) / (count - 1)) for i in range(count)})
    head = -(-count // 2)
    return [*range(head), *range(num_target_layers - (count - head), num_target_layers)]


def from_layers(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model of the target's family with only the given layers, weights copied, float32."""
    config = with_layers(target.config, layers)
    config.dtype = torch.float32
    draft = AutoModelForCausalLM.from_config(config).float()
    draft.generation_config = copy.deepcopy(target.generation_config)
    theirs, ours = decoder_layers(target), decoder_layers(draft)
    inside = {id(module) for layer in ours for module in layer.modules()}
    sources = dict(target.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, module in draft.named_modules():
            if id(module) in inside:
                continue
            for key, parameter in module.named_parameters(recurse=False):
                parameter.copy_(sources[f"{name}.{key}" if name else key])
        for layer, index in zip(ours, layers, strict=True):
            layer.load_state_dict(theirs[index].state_dict())
    return draft


def fit_vocabulary(model: PreTrainedModel, vocab_size: int) -> PreTrainedModel:
    """Give a small model of the same tokenizer the target's number of ids: both pad their
    vocabularies as they like.

    Ids that it lacks get a copy of its last row, which is padding already or a token as rare as
    any.
    """
    size = model.config.vocab_size
    if size != vocab_size:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
        with torch.no_grad():
            for module in (model.get_input_embeddings(), model.get_output_embeddings()):
                weight = module.weight
                assert isinstance(weight, Tensor)
                weight[size:] = weight[min(size, vocab_size) - 1]
    return model


def final_norm(body: nn.Module) -> nn.Module:
    """The normalisation after the last layer: the body's last child that holds only vectors."""
    norms = [
        module
        for module in body.children()
        if not isinstance(module, nn.ModuleList | nn.Embedding)
        and [parameter.ndim for parameter in module.parameters()] in ([1], [1, 1])
    ]
    if not norms:
        raise ConfigError(
            f"{type(body).__name__}: no final normalisation found, so it cannot be warm started. "
            "Set draft.warm_start=false."
        )
    return norms[-1]


def neutralise(norm: nn.Module) -> None:
    """Give a normalisation no scale of its own: output of unit mean square, whether it multiplies
    by w or by 1 + w.
    """
    probe = torch.randn(64, next(norm.parameters()).numel(), device=next(norm.parameters()).device)
    with torch.no_grad():
        for name, parameter in norm.named_parameters():
            parameter.fill_(0.0 if "bias" in name else 1.0)
        if norm(probe).pow(2).mean() > 2:
            for parameter in norm.parameters():
                parameter.fill_(0.0)


@torch.no_grad()
def warm_start(draft: DraftModel, batches: Iterable[tuple[Batch, Tensor]], ridge: float) -> int:
    """Set the map to the ridge regression from the body's normalised output to what the target's
    head read, see `ridge_maps`. Returns the positions used. Needs a draft whose head is the
    target's.
    """
    draft.eval()  # no dropout: the target had none
    neutralise(final_norm(draft.body))
    nn.init.eye_(draft.map.weight)
    maps_1ED, count = ridge_maps(lambda batch: draft(batch)[:, batch.supervised_N], batches, ridge)
    draft.map.weight.copy_(maps_1ED[0])
    return count


@torch.no_grad()
def ridge_maps(
    read: Callable[[Batch], Tensor], batches: Iterable[tuple[Batch, Tensor]], ridge: float
) -> tuple[Tensor, int]:
    """Ridge regressions from K readings of a batch (KND) to what the target's head read there (NE):
    maps KED in float64, and the positions used.

    W = argmin sum |W x - y|^2 + lambda |W|^2 over the given positions, x a reading, y the target's;
    lambda = ridge * mean diagonal of X'X. Sums in float64.
    """
    xx_KDD = xy_KDE = torch.zeros((), dtype=torch.float64)
    count = 0
    for batch, hidden_NE in batches:
        x_KND = read(batch).float()
        xx_KDD = xx_KDD + (x_KND.mT @ x_KND).double().cpu()
        xy_KDE = xy_KDE + (x_KND.mT @ hidden_NE.to(x_KND)).double().cpu()
        count += len(hidden_NE)
    if count == 0:
        raise ConfigError(
            "draft.warm_start=true: no hidden states were recorded. Set generate.warm_start_tokens"
            " above 0, or draft.warm_start=false."
        )
    penalty_KD = ridge * xx_KDD.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    penalty_KDD = penalty_KD.expand(xx_KDD.shape[:2]).diag_embed()
    return torch.linalg.solve(xx_KDD + penalty_KDD, xy_KDE).mT, count


def rank_vocabulary(rows: Iterable[Row], vocab_size: int) -> Tensor:
    """Ids by how much of the target's probability they carried in its answers, largest first;
    unseen ids follow by number.

    Byte-pair vocabularies are numbered by the order of their merges, so a lower number is the
    likelier unseen id.
    """
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for row in rows:
        answer = row.of_answer()
        laws = answer.top_log_p.exp().double()
        mass.index_add_(0, answer.top_ids.flatten(), laws.flatten())
        mass.index_add_(0, row.generated, torch.ones(len(row.generated), dtype=torch.float64))
    return mass.sort(descending=True, stable=True).indices


def choose_hot_ids(config: DraftConfig, rows: Iterable[Row], vocab_size: int) -> Tensor | None:
    """Ids that the draft proposes, in order; None: all."""
    if not 0 < config.hot_vocab < vocab_size:
        return None
    return rank_vocabulary(rows, vocab_size)[: config.hot_vocab].sort().values
