"""A stand-in for vLLM: what its documentation says of offline inference, as far as it is used here,
over plain calls of a small model. It stops, samples and lists log-probabilities as vLLM does.

`python -m tests.stand_in_vllm N ...` does what `python -m train ...` does where it is installed,
and is killed when vLLM is asked for answers the Nth time; 0: never.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NAME = "vllm"
VERSION = "0.32.0"
SMALLEST = 0.01  # a temperature below it becomes it


@dataclass
class Logprob:
    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature must be in [0, 2], got {self.temperature}.")
        if 0 < self.temperature < SMALLEST:
            self.temperature = SMALLEST


@dataclass
class CompletionOutput:
    token_ids: Sequence[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    index: int = 0
    text: str = ""


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None


@dataclass
class LLM:
    """`made` are all that there are; `calls` what they were asked for."""

    model: str
    revision: str | None = None
    tokenizer_revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    max_model_len: int = 0
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    calls: list[list[SamplingParams]] = field(default_factory=list)
    is_shut_down: bool = False

    made: ClassVar[list[LLM]] = []
    killed_at: ClassVar[int] = 0

    def __post_init__(self) -> None:
        self._weights: Any = AutoModelForCausalLM.from_pretrained(
            self.model, dtype=getattr(torch, self.dtype)
        ).eval()
        most = self._weights.config.max_position_embeddings
        if self.max_model_len > most:
            raise ValueError(
                f"1 validation error for ModelConfig\n  Value error, User-specified max_model_len"
                f" ({self.max_model_len}) is greater than the derived max_model_len"
                f" (max_position_embeddings={most}). [type=value_error, input_value=ArgsKwargs(())]"
            )
        self._eos = AutoTokenizer.from_pretrained(self.model).eos_token_id
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self._shut_down))
        LLM.made.append(self)

    def _shut_down(self) -> None:
        self.is_shut_down = True

    @torch.no_grad()
    def generate(
        self,
        prompts: list[dict[str, list[int]]],
        sampling_params: list[SamplingParams],
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        assert not self.is_shut_down and not use_tqdm
        self.calls.append(list(sampling_params))
        if len(self.calls) == LLM.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return [
            self._answer(prompt["prompt_token_ids"], asked)
            for prompt, asked in zip(prompts, sampling_params, strict=True)
        ]

    def _answer(self, prompt: list[int], asked: SamplingParams) -> RequestOutput:
        if max(asked.logprobs or 0, asked.prompt_logprobs or 0) > self.max_logprobs:
            raise ValueError("more logprobs than max_logprobs")
        if len(prompt) >= self.max_model_len:
            raise ValueError(f"The decoder prompt (length {len(prompt)}) is longer than the model")
        rng = torch.Generator()
        if asked.seed is None:
            rng.seed()
        else:
            rng.manual_seed(asked.seed)
        stops = {self._eos, *(asked.stop_token_ids or [])}
        tokens: list[int] = []
        laws: list[dict[int, Logprob]] = []
        most = min(asked.max_tokens, self.max_model_len - len(prompt))
        while len(tokens) < most and not (tokens and tokens[-1] in stops):
            logits_V = self._logits([*prompt, *tokens])[-1]
            tempered_V = logits_V / (asked.temperature or 1.0)
            token = int(tempered_V.argmax())
            if asked.temperature:
                noise_V = torch.empty_like(tempered_V).exponential_(generator=rng)
                token = int((tempered_V.softmax(-1) / noise_V).argmax())
            tokens.append(token)
            is_raw = self.logprobs_mode == "raw_logprobs"
            if asked.logprobs is not None:
                laws.append(_listed(logits_V if is_raw else tempered_V, token, asked.logprobs))
        ended = "stop" if tokens[-1] in stops else "length"
        completion = CompletionOutput(tokens, laws if asked.logprobs is not None else None, ended)
        read: list[dict[int, Logprob] | None] | None = None
        if asked.prompt_logprobs is not None:
            logits_PV = self._logits(prompt)
            pairs = zip(logits_PV, prompt[1:], strict=False)
            read = [None, *(_listed(row, token, asked.prompt_logprobs) for row, token in pairs)]
        return RequestOutput(prompt, [completion], read)

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self._weights(torch.tensor([tokens])).logits[0].float()
        return logits


def _listed(logits_V: torch.Tensor, token: int, number: int) -> dict[int, Logprob]:
    """The token itself first, then the likeliest; in all one more where it is none of these."""
    log_p_V = logits_V.log_softmax(-1)
    listed = {token: Logprob(float(log_p_V[token]), int((log_p_V > log_p_V[token]).sum()) + 1)}
    top = log_p_V.topk(number)
    for rank, (value, other) in enumerate(zip(top.values, top.indices, strict=True), 1):
        listed.setdefault(int(other), Logprob(float(value), rank))
    return listed


def stand_in() -> ModuleType:
    """The package, for sys.modules; no calls were made yet."""
    package = ModuleType(NAME)
    package.__spec__ = ModuleSpec(NAME, None)
    LLM.made.clear()
    for name, value in (("__version__", VERSION), ("LLM", LLM), ("SamplingParams", SamplingParams)):
        setattr(package, name, value)
    return package


if __name__ == "__main__":
    from train.app import main

    sys.modules[NAME] = stand_in()
    LLM.killed_at = int(sys.argv.pop(1))
    main()
