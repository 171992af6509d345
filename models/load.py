"""Targets and drafts from the Hub, local folders or GGUF files inside installed packages."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from conf.choices import Device, Dtype
from conf.errors import ConfigError, require
from conf.groups import RuntimeConfig, TargetConfig
from conf.run import peak_memory_gib
from conf.schema import Config

# written last: a cache folder without it is a conversion that was interrupted
CONVERTED = "converted-from.json"


@dataclass(frozen=True)
class Target:
    """Where the target's plain transformers folder (or Hub id) is, its configuration and its
    tokenizer.
    """

    source: str
    revision: str | None
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer: the tokenizer's EOS and what the model's configuration and its
        generation settings add. Chat models often name the end of a turn in the last only.
        """
        ids: set[int] = set()
        for held in (self.tokenizer, self.config, self.generation):
            found = held.eos_token_id
            ids.update(found if isinstance(found, list) else [] if found is None else [found])
        return frozenset(ids)


def device_of(runtime: RuntimeConfig) -> torch.device:
    """The device to run on. Raises ConfigError when CUDA is asked for and absent."""
    available = torch.cuda.is_available()
    require(
        runtime.device is not Device.cuda or available,
        "runtime.device",
        "cuda",
        "torch sees no CUDA device here",
        "Use runtime.device=auto or install a CUDA build of torch",
    )
    if runtime.device is Device.cpu or not available:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def peak_gib(device: torch.device) -> float:
    """Most memory held so far, in GiB: the device's, on a CPU the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return peak_memory_gib()


def set_threads(runtime: RuntimeConfig) -> None:
    """Limit torch's CPU threads where the configuration says so."""
    if runtime.num_threads:
        torch.set_num_threads(runtime.num_threads)


def release_freed() -> None:
    """Hand the memory of dropped objects back to the system: glibc keeps that of small blocks,
    which for a model's weights is most of it.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def cache_folder() -> Path:
    """Where converted targets are kept between runs: $DRAFTSMITH_CACHE, or ~/.cache/draftsmith."""
    return Path(os.environ.get("DRAFTSMITH_CACHE", Path.home() / ".cache" / "draftsmith"))


def open_target(config: Config, say: Callable[[str], None] | None = None) -> Target:
    """Find the target, converting a GGUF file once; reads its configuration and tokenizer, not its
    weights.

    `say` is told before a conversion, which takes up to a minute.
    """
    target = config.target
    source, revision = target.path, target.revision
    if target.gguf:
        source = str(_converted(gguf_file(target), say))
    is_folder = Path(source).is_dir()
    options: dict[str, Any] = {"trust_remote_code": target.trust_remote_code}
    if not is_folder:
        options["revision"] = revision
    try:
        model_config = AutoConfig.from_pretrained(source, **options)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError) as failed:
        raise ConfigError(
            f"target.path={target.path}: it cannot be loaded ({why_not_loaded(failed)}). Give a Hub"
            " id you have access to, or a folder with config.json, weights and tokenizer."
        ) from None
    require(
        tokenizer.eos_token_id is not None,
        "target.path",
        target.path,
        "its tokenizer has no end-of-sequence token, so answers would never end",
        "Set eos_token in its tokenizer_config.json",
    )
    try:
        generation = GenerationConfig.from_pretrained(source, **options)
    except OSError:  # older models come without
        generation = GenerationConfig()
    return Target(source, None if is_folder else revision, model_config, tokenizer, generation)


def why_not_loaded(failed: Exception) -> str:
    """The reason in transformers' long answer to a name that is neither a folder nor on the Hub."""
    if "repo id must" in str(failed).lower():
        return "there is no such folder, and it is no Hub id"
    return str(failed).splitlines()[0].rstrip(".")


def load_model(
    target: Target, config: TargetConfig, device: torch.device, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The target's weights, in the numbers that the configuration says or in others.

    With `target.dtype=auto` they are rounded to bfloat16 on every machine, also where it computes
    in float32.
    """
    model = load_folder(
        target.source,
        dtype=stored_dtype(config, device),
        device=device,
        revision=target.revision,
        trust_remote_code=config.trust_remote_code,
    )
    # the wrapped method has a signature that type checkers misread
    nn.Module.to(model, dtype_of(config.dtype, device) if dtype is None else dtype)
    return model


def stored_dtype(config: TargetConfig, device: torch.device) -> torch.dtype:
    """The numbers that the target's weights are rounded to, and an exported draft's."""
    return torch.bfloat16 if config.dtype is Dtype.auto else dtype_of(config.dtype, device)


def dtype_of(dtype: Dtype, device: torch.device) -> torch.dtype:
    """What to compute in on a device; `auto`: bfloat16 where the device multiplies it, else
    float32.
    """
    if dtype is not Dtype.auto:
        found: torch.dtype = getattr(torch, str(dtype))
        return found
    return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for products of bfloat16: a CPU without them takes five
    times as long as for float32.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if platform.machine().lower() in ("arm64", "aarch64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def load_folder(
    source: str | Path, *, dtype: torch.dtype, device: torch.device, **options: Any
) -> PreTrainedModel:
    """A causal language model from a folder or Hub id, in evaluation mode."""
    options = {key: value for key, value in options.items() if value is not None}
    model = AutoModelForCausalLM.from_pretrained(str(source), dtype=dtype, **options)
    nn.Module.to(model, device)  # the wrapped method has a signature that type checkers misread
    return model.eval()


def describe(target: Target, config: TargetConfig, model: PreTrainedModel) -> dict[str, Any]:
    """What manifests and reports say of a target."""
    return {
        "name": config.path,
        "package": config.package,
        "revision": config.revision,
        "architecture": type(model).__name__,
        "vocab_size": target.config.vocab_size,
        "num_layers": target.config.num_hidden_layers,
        "hidden_size": target.config.hidden_size,
        "parameters": num_weights(model),
        "bytes": num_weights(model) * model.dtype.itemsize,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def num_weights(model: PreTrainedModel) -> int:
    """Weights of a model, those of a tied head once."""
    total = sum(parameter.numel() for parameter in model.parameters())
    # packed for a processor, a layer's weight is no parameter any more
    packed = (
        m for m in model.modules() if isinstance(m, nn.Linear) and "weight" not in m._parameters
    )
    total += sum(module.in_features * module.out_features for module in packed)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    # a tied head then has a copy of its own
    is_copied = model.config.tie_word_embeddings and head.weight is not embedding.weight
    return total - head.weight.numel() if is_copied else total


def gguf_file(target: TargetConfig) -> Path:
    """The GGUF file, found in the package's metadata without importing it."""
    if not target.package:
        path = Path(target.path)
        require(
            path.is_file(),
            "target.path",
            target.path,
            "there is no such GGUF file",
            "Give the file's path",
        )
        return path
    for file in importlib.metadata.files(target.package) or []:
        if file.name == Path(target.path).name:
            return Path(str(file.locate()))
    raise ConfigError(
        f"target.path={target.path}: package {target.package} ships no such file. List its files"
        f" with `pip show -f {target.package}`."
    )


def is_plain(target: TargetConfig) -> bool:
    """Whether opening a target converts nothing: it is no GGUF file, or was converted before."""
    return not target.gguf or (_folder_of(gguf_file(target)) / CONVERTED).is_file()


def _folder_of(gguf: Path) -> Path:
    with gguf.open("rb") as file:
        head = file.read(1 << 20)
    digest = hashlib.sha256(head + str(gguf.stat().st_size).encode()).hexdigest()[:12]
    return cache_folder() / "targets" / f"{gguf.stem}-{digest}"


def _converted(gguf: Path, say: Callable[[str], None] | None) -> Path:
    """A plain folder made from a GGUF file, kept under its name and the digest of its head and
    size.
    """
    folder = _folder_of(gguf)
    if (folder / CONVERTED).is_file():
        return folder
    if say is not None:
        say(
            f"Converting {gguf.name} to a plain folder, once: up to a minute. It is kept in"
            f" {folder.parent}."
        )
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / CONVERTED).write_text(
        json.dumps({"file": gguf.name, "bytes": gguf.stat().st_size}) + "\n"
    )
    if folder.exists() and not (folder / CONVERTED).is_file():
        shutil.rmtree(folder)
    try:
        partial.rename(folder)
    except OSError:
        if not (folder / CONVERTED).is_file():
            raise
        shutil.rmtree(partial)  # another process was faster, and may be reading its folder
    return folder
