"""What a model's program may use, and how it can be shut in."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Isolation = Literal["namespaces", "user namespaces"]

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What a program may use; each process that it starts has the CPU time and the memory for itself."""

    cpu_seconds: int = 5
    wall_seconds: float = 20.0  # well above the CPU time, so that a busy machine does not fail a program
    memory: int = 1024 * MIB  # bytes of address space
    processes: int = 32  # threads count too
    file_size: int = 16 * MIB  # bytes of one file
    disk: int = 64 * MIB  # bytes of all files together
    output: int = 4 * MIB  # bytes on stdout and stderr

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ValueError(f"the limit {name} must be above 0, not {value}")
