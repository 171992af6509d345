"""Devices as their makers state them, and what `stage=plan` reckons with."""

from __future__ import annotations

from dataclasses import dataclass

from conf.errors import require


@dataclass(frozen=True)
class Device:
    """Figures of a data sheet: dense products of bfloat16, and the memory's rate and size."""

    tflops: float
    gb_per_s: float
    gb: float


DEVICES = {
    "a100": Device(312, 2039, 80),
    "h100": Device(989, 3350, 80),
    "h200": Device(989, 4800, 141),
    "b200": Device(2250, 8000, 180),
    "l4": Device(121, 300, 24),
    "l40s": Device(362, 864, 48),
    "rtx4090": Device(165, 1008, 24),
    "mi300x": Device(1307, 5300, 192),
}


@dataclass
class PlanConfig:
    """What a run would take, reckoned for this machine or for another."""

    device: str = ""  # one of DEVICES; empty: the device here, with rates measured on it
    num_devices: int = 1  # that share generation and training

    def __post_init__(self) -> None:
        require(
            self.device in ("", *DEVICES),
            "plan.device",
            repr(self.device),
            "its rates are not known",
            f"Use one of {', '.join(sorted(DEVICES))}, or leave it out to measure this machine",
        )
        require(
            self.num_devices >= 1,
            "plan.num_devices",
            self.num_devices,
            "something must do the work",
            "Use 1 or more",
        )
