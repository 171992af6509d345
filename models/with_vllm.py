"""The target inside vLLM, in the place of our own engine.

Written to vLLM's documented interface for offline inference, as of the versions that run with
transformers 5: 0.19.1 and later. Tested with a stand-in for that interface, tests/stand_in_vllm.py,
and not with vLLM itself.
"""

# M laws, K recorded ids

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from conf.errors import ConfigError, require
from conf.schema import Config
from models.anatomy import without_weights
from models.decoding.autoregressive import Answer
from models.decoding.engine import shared_beginning
from models.decoding.sampling import check_finite
from models.jobs import Job
from models.laws import as_tensors, require_same_law
from models.load import Target, device_of, release_freed, stored_dtype
from models.recording import Writer, written


class Vllm:
    """Records what vLLM lets the target answer. The weights are in vLLM's hands, and `model` has
    none.

    An answer's seed depends on the run and on the answer alone. vLLM's sums are rounded by what is
    computed together, which can still turn a token over, unless it is told to avoid that
    (VLLM_BATCH_INVARIANT=1).

    Raises ConfigError in a launch of several processes.
    """

    device = "vllm"

    def __init__(self, config: Config, target: Target, say: Callable[[str], None]) -> None:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        require(
            world == 1,
            "generate.engine",
            config.generate.engine,
            f"vLLM starts its own processes, and this is one of {world}",
            "Record with one command, python -m train stage=generate"
            f" generate.vllm.tensor_parallel_size={world}, and launch the other stages after it",
        )
        self.config, self.target, self.say = config, target, say
        self.model = without_weights(
            target.config, trust_remote_code=config.target.trust_remote_code
        )
        self._llm: Any = None
        self._version = ""

    def open(self, job: Job) -> None:
        """Load the target, and see by the law of one token whether laws are those at temperature 1.
        Raises ConfigError where they are not, or vLLM refuses the target.
        """
        # vLLM forks by default, which programs with threads, as this one, must not do
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm

        self._version = vllm.__version__
        self.say(f"generate: vLLM {self._version} loads the target, which can take minutes.")
        try:
            self._llm = vllm.LLM(**self._arguments())
        except ValueError as refused:
            reason = " ".join(str(refused).partition("[type=")[0].split()).rstrip(".")
            raise ConfigError(
                f"generate.engine=vllm: it does not take the target ({reason}). Its max_model_len"
                " is generate.max_prompt_tokens plus generate.max_new_tokens, and generate.vllm is"
                " what it may use: change these, or use generate.engine=builtin."
            ) from None
        self._require_laws_at_one(job)

    def _arguments(self) -> dict[str, Any]:
        settings, target = self.config.generate, self.config.target
        dtype = stored_dtype(target, device_of(self.config.runtime))
        return {
            "model": self.target.source,
            "revision": self.target.revision,
            "tokenizer_revision": self.target.revision,
            "trust_remote_code": target.trust_remote_code,
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": settings.max_prompt_tokens + settings.max_new_tokens,
            "max_logprobs": settings.top_k,
            "logprobs_mode": "raw_logprobs",  # at temperature 1, whatever is sampled at
            "tensor_parallel_size": settings.vllm.tensor_parallel_size,
            "gpu_memory_utilization": settings.vllm.gpu_memory_utilization,
            # it keeps no laws of what it has read: https://github.com/vllm-project/vllm/issues/13409
            "enable_prefix_caching": not settings.reads_prompts,
        }

    def _require_laws_at_one(self, job: Job) -> None:
        temperatures = self.config.generate.all_temperatures
        others = sorted({*temperatures} - {1.0})
        asked = [self._parameters(job, temperature, 1) for temperature in (1.0, *others)]
        said = self._llm.generate([_prompt(job)] * len(asked), asked, use_tqdm=False)
        at_one, *laws = (_law(output.outputs[0].logprobs[0]) for output in said)
        for temperature, law in zip(others, laws, strict=True):
            require_same_law(
                at_one,
                law,
                temperature,
                temperatures,
                whose="vLLM's",
                way_out="another version of vLLM, or generate.engine=builtin",
            )

    def _parameters(
        self, job: Job, temperature: float, max_tokens: int, *, read_prompt: bool = False
    ) -> Any:
        from vllm import SamplingParams

        top_k = self.config.generate.top_k
        return SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            seed=job.seed(self.config.seed),
            stop_token_ids=sorted(self.target.stop_ids),
            logprobs=top_k,
            prompt_logprobs=top_k if read_prompt else None,
            detokenize=False,
        )

    def manifest(self) -> dict[str, Any]:
        """What is to be known of the recording."""
        if not self._version:  # everything was there already
            return {"kind": "vllm"}
        return {"kind": "vllm", "version": self._version}

    def record(self, jobs: Sequence[Job], writer: Writer) -> Iterator[Answer]:
        """Answer jobs, none of which waits for another, and write what was recorded after each
        call.
        """
        if self._llm is None:
            self.open(jobs[0])
        yield from written(self._answers(jobs), jobs, writer, self.config.generate.mass)

    def _answers(self, jobs: Sequence[Job]) -> Iterator[Answer]:
        settings = self.config.generate
        num_shared = len(shared_beginning([job.prompt for job in jobs]))
        for start in range(0, len(jobs), settings.vllm.answers_per_call):
            called = jobs[start : start + settings.vllm.answers_per_call]
            asked = [
                self._parameters(
                    job,
                    job.temperature,
                    settings.max_new_tokens,
                    read_prompt=settings.reads_prompts and job.split == "train",
                )
                for job in called
            ]
            said = self._llm.generate([_prompt(job) for job in called], asked, use_tqdm=False)
            for job, output in zip(called, said, strict=True):
                yield self._answer(job, output, num_shared)

    def _answer(self, job: Job, output: Any, num_shared: int) -> Answer:
        (completion,) = output.outputs
        tokens, told = list(completion.token_ids), output.prompt_logprobs or []
        assert len(told) in (0, len(job.prompt)), "laws of another prompt"
        assert len(completion.logprobs) == len(tokens) > 0, "tokens without laws"
        # a prompt's first token has no law
        read = [_law(law) for law in told[1 + num_shared :]]
        generated = [_law(law) for law in completion.logprobs]
        # the token that was drawn is listed too where it is none of the likeliest
        ids_MK, log_p_MK = as_tensors([*read, *generated], self.config.generate.top_k)
        check_finite(log_p_MK, "target", len(job.prompt) - 1 - len(read))
        return Answer(job.index, job.prompt, job.temperature, tokens, log_p_MK, ids_MK, None)

    def close(self) -> None:
        """End vLLM's processes, and with them what they hold of the GPUs."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
        release_freed()
        torch.cuda.empty_cache()  # of an engine in this process; it does nothing without a GPU


def _prompt(job: Job) -> dict[str, list[int]]:
    return {"prompt_token_ids": job.prompt}


def _law(listed: Mapping[int, Any]) -> dict[int, float]:
    return {number: entry.logprob for number, entry in listed.items()}
