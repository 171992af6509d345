"""Several processes: what they add up, and a draft whose weights they share out between them.

Sharded (FSDP2), each process keeps its part of every weight, gradient and moment, and a layer is
whole only while it computes. Gradients are summed, not averaged: each loss has already been divided
by the global number of tokens. Checkpoints hold whole tensors, so they are those of one process.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from conf.choices import Optimizer, Supervision
from conf.errors import require
from conf.schema import Config
from models.decoding.routing import decoder_layers
from models.draft import DraftModel


def shards_weights() -> bool:
    """Whether the launch asks for it: `accelerate launch --use_fsdp --fsdp_version 2`."""
    return os.environ.get("ACCELERATE_USE_FSDP") == "true"


def require_shardable(config: Config) -> None:
    """Raise ConfigError for what a sharded draft cannot do."""
    if not shards_weights():
        return
    version = os.environ.get("FSDP_VERSION", "1")
    require(version == "2", "--fsdp_version", version, "weights are shared out by FSDP2", "Use 2")
    offload = os.environ.get("FSDP_OFFLOAD_PARAMS", "false")
    require(
        offload.lower() == "false",
        "--fsdp_offload_params",
        offload,
        "the optimizer's step is not made for weights in another memory than the draft's",
        "Leave it out, and use more processes",
    )
    require(
        config.optim.name is not Optimizer.muon,
        "optim.name",
        config.optim.name,
        "Muon orthogonalises whole matrices, and FSDP keeps parts of them",
        "Use optim=adamw, or launch without --use_fsdp",
    )
    require(
        not config.draft.lora_rank,
        "draft.lora_rank",
        config.draft.lora_rank,
        "adapters are too small to be shared out",
        "Launch without --use_fsdp",
    )
    for key in ("source", "finish_source"):
        source = getattr(config.objective, key)
        require(
            source is not Supervision.on_policy,
            f"objective.{key}",
            source,
            "every process rolls out texts of its own, and a sharded draft computes only where all"
            " processes do",
            "Use online, or launch without --use_fsdp",
        )


def shard(model: DraftModel, device: torch.device) -> None:
    """Share out the trainable weights: layer by layer, and what is around the layers. Of the
    launch's settings that for resharding holds; frozen tables stay whole.
    """
    plugin = FullyShardedDataParallelPlugin()
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (distributed.get_world_size(),)),
        "reshard_after_forward": plugin.reshard_after_forward,
    }
    frozen = {each for each in model.parameters() if not each.requires_grad}
    parts: list[nn.Module] = [*decoder_layers(model.full[0]), model.body, model.map]
    for part in parts:
        sharded = fully_shard(part, ignored_params=frozen, **settings)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot scale as it sums


def is_sharded(model: DraftModel) -> bool:
    """Whether every computation of the draft needs all processes."""
    return isinstance(model.body, FSDPModule)


def local(tensor: Tensor) -> Tensor:
    """This process's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tree: Any) -> Any:
    """Nested containers with every shared-out tensor gathered, on all processes at once."""
    if isinstance(tree, Mapping):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(whole(value) for value in tree)
    return tree.full_tensor().cpu() if isinstance(tree, DTensor) else tree


def share_out(value: Any, like: Tensor | None) -> Any:
    """A whole tensor cut as `like` is, where that has its shape and is shared out."""
    if isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape:
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value


def share_out_weights(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Whole weights of a checkpoint as a model's `load_state_dict` takes them."""
    own = dict(model.named_parameters())
    return {name: share_out(value, own.get(name)) for name, value in weights.items()}


def share_out_moments(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A whole state of an optimizer as its `load_state_dict` takes it."""
    own = [each for group in optimizer.param_groups for each in group["params"]]
    moments = {
        number: {key: share_out(value, own[number]) for key, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": moments}


def gathered(model: DraftModel, weights: Mapping[str, Tensor]) -> DraftModel:
    """The draft of a checkpoint, whole in this process; the model itself where it is not sharded.

    Frozen weights, which no checkpoint holds, are the model's own.
    """
    if not is_sharded(model):
        model.load_state_dict(weights, strict=False)
        return model
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(model.config)).float()
    plain.generation_config = model.full[0].generation_config
    result = DraftModel(plain)
    result.head = model.head
    held = {name: p for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    buffers = dict(model.named_buffers())
    result.load_state_dict({**held, **buffers, **weights}, strict=False)
    return result.to(model.head.device)


def agree_on(parameter: Tensor) -> None:
    """Give every process the first one's values, where processes may have rounded differently."""
    if distributed.is_initialized():
        distributed.broadcast(parameter.data, 0)


def agreed(number: int, device: torch.device) -> int:
    """The first process's number."""
    if not distributed.is_initialized():
        return number
    shared = torch.tensor(number, device=device)
    distributed.broadcast(shared, 0)
    return int(shared)


def sum_over_processes(values: Tensor, device: torch.device) -> Tensor:
    """Of a tensor that every process has."""
    values = values.to(device)
    distributed.all_reduce(values)
    return values.cpu()


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Over processes. Those of shared-out weights are summed in the backward pass."""
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        distributed.all_reduce(parameter.grad)
