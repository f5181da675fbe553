"""What a run is to do, as plain data: kept beside its records, so that a resumed run is the same run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from simplexity.decoders import decoder
from simplexity.engines.rows_by_decoder import refuse_needy, refuse_siblings
from simplexity.evaluation.arms import Arm
from simplexity.evaluation.task import Question
from simplexity.specs import nearest

ENGINES = ("transformers", "vllm")


@dataclass(frozen=True)
class RunPlan:
    """One model on one task under several decoders; `batch` rows are written at a time, n of each question.

    Every decoder draws its n samples in groups of each size in `coupled`; 1 is independent samples.
    """

    model: str | None
    task: str
    decoders: tuple[str, ...]
    n: int = 8
    seed: int = 0
    limit: int | None = None
    data: str | None = None
    batch: int = 16
    max_new_tokens: int = 3072
    raw: bool = False
    dtype: str | None = None
    controls: bool = True
    every: int = 4  # steps between two looks at q's entropy
    coupled: tuple[int, ...] = (1,)
    engine: str = "transformers"

    def __post_init__(self) -> None:
        for name in ("n", "batch", "max_new_tokens", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.engine not in ENGINES:
            raise ValueError(f"unknown engine {self.engine!r}{nearest(self.engine, ENGINES)}")
        if self.batch < self.n:
            raise ValueError(f"a batch of {self.batch} rows cannot hold the {self.n} samples of one question")
        if not self.decoders:
            raise ValueError("give at least one decoder")
        if min(self.coupled, default=0) < 1:
            raise ValueError("coupled: give the sizes of groups, 1 for independent samples")
        for size in self.coupled:
            if self.n % size:
                raise ValueError(f"n = {self.n} samples do not make whole groups of {size} coupled ones")
        for spec in self.decoders:
            refuse_needy(decoder(spec), "an evaluation")
            if self.engine == "vllm":
                refuse_siblings(decoder(spec), "vLLM")
        # in one spelling, so that the same decoder is never run twice
        object.__setattr__(self, "decoders", tuple(dict.fromkeys(str(decoder(spec)) for spec in self.decoders)))
        object.__setattr__(self, "coupled", tuple(sorted(set(self.coupled))))
        for spec in self.decoders:
            if spec not in {arm.decoder for arm in self.arms}:
                raise ValueError(f"{spec} looks at the samples of its group: give groups of 2 or more coupled ones")

    @property
    def arms(self) -> list[Arm]:
        """Every decoder at every size of group; one that looks at its siblings has no independent samples."""
        return [
            Arm(spec, size)
            for spec in self.decoders
            for size in self.coupled
            if size > 1 or not decoder(spec).reads("siblings")
        ]

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        return asdict(self) | {"decoders": list(self.decoders), "coupled": list(self.coupled)}

    def difference(self, other: dict[str, Any]) -> list[str]:
        """What a plan read from a file says differently, one line each."""
        own, other = self.to_json(), {"coupled": [1], "engine": "transformers"} | other  # older plans do not say
        names = [name for name in {**own, **other} if own.get(name) != other.get(name)]
        return [f"{name}: {other.get(name)!r} there, {own.get(name)!r} now" for name in names]


@dataclass(frozen=True)
class Work:
    """One batch: some questions under one arm, all n samples of each, so that a group is never torn."""

    arm: Arm
    number: int
    questions: tuple[Question, ...]


def at_temperatures(specs: Sequence[str], temperatures: Sequence[float]) -> list[str]:
    """Every decoder at every temperature; one without a temperature stays as it is.

    >>> at_temperatures(["softmax", "greedy"], [0.5, 0.9])
    ['softmax:temperature=0.5', 'softmax:temperature=0.9', 'greedy']
    """
    found = []
    for spec in specs:
        made = decoder(spec)
        settable = {f.name for f in made.parameters()}
        if "temperature" not in settable or not temperatures:
            found.append(str(made))
            continue
        if any(f"{name}=" in spec for name in ("temperature", "entropy", "effective_temperature")):
            raise ValueError(f"{spec}: it has a temperature of its own, and temperatures were given beside it")
        found += [str(decoder(made.to_json() | {"temperature": temperature})) for temperature in temperatures]
    return list(dict.fromkeys(found))


def batches(plan: RunPlan, arm: Arm, questions: Sequence[Question]) -> list[Work]:
    """The questions in groups of a batch, the longest prompts first: those show soonest whether memory suffices."""
    order = sorted(questions, key=lambda q: (-len(q.prompt), q.id))
    size = plan.batch // plan.n
    return [Work(arm, i // size, tuple(order[i : i + size])) for i in range(0, len(order), size)]


def fingerprint(questions: Sequence[Question]) -> str:
    """What tells whether two runs ask the same."""
    said = json.dumps([(q.id, q.prompt, q.reference) for q in questions], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def seed_of(plan: RunPlan, question: Question) -> int:
    """A question's seed: the same under every arm, so that differences between decoders are paired."""
    return int.from_bytes(hashlib.sha256(f"{plan.seed}\n{question.id}".encode()).digest()[:8], signed=True)
