"""Settings of vLLM where it answers prompts in this process, with `generate.engine=vllm`."""

from __future__ import annotations

from dataclasses import dataclass

from conf.errors import require


@dataclass
class VllmConfig:
    """What vLLM may use. Nothing of this determines what is recorded."""

    tensor_parallel_size: int = 1  # GPUs that share the target
    gpu_memory_utilization: float = 0.9  # the share of each one's memory
    # vLLM is asked for so many answers at a time: a killed run loses those it was asked for, their
    # laws are held until all have come, and the last of them are decoded with few others
    answers_per_call: int = 512

    def __post_init__(self) -> None:
        for key in ("tensor_parallel_size", "answers_per_call"):
            value = getattr(self, key)
            require(
                value >= 1, f"generate.vllm.{key}", value, "it must be positive", "Use 1 or more"
            )
        require(
            0 < self.gpu_memory_utilization <= 1,
            "generate.vllm.gpu_memory_utilization",
            self.gpu_memory_utilization,
            "it is a share of the memory",
            "Use for example 0.9",
        )
