"""A run in numbers: one line for each arm, its matched control beside it, and its family's frontier."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from simplexity.decoders import decoder
from simplexity.evaluation.arms import Arm
from simplexity.evaluation.frontier import area_interval, matched
from simplexity.evaluation.intervals import Interval, PerQuestion, interval, paired_difference
from simplexity.evaluation.plan import RunPlan
from simplexity.evaluation.records import Record, read_run
from simplexity.evaluation.run import SHARPER, control_of, mean_temperature
from simplexity.evaluation.scores import Sampled

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Line:
    """One arm's samples and what they say."""

    arm: Arm
    asked: bool  # False: a control that the run added
    sampled: Sampled
    temperature: float | None  # its own parameter
    knob: float | None  # the value of the parameter that a sweep of it turns
    effective_temperature: float | None
    entropy: float
    tokens: float  # mean length of a text
    cut: float  # share of texts that the limit ended
    seconds: float  # per text

    @cached_property
    def family(self) -> Arm:
        """The arm with its knob where it stands by itself: what a sweep has in common."""
        if self.knob is None:
            return self.arm
        found: Any = decoder(self.arm.decoder)
        default = next(f.default for f in found.parameters() if f.name == found.knob)
        return Arm(str(decoder(found.to_json() | {found.knob: default})), self.arm.coupled)

    @cached_property
    def accuracy(self) -> Interval:
        """The mean over questions and samples."""
        return interval(self.sampled.accuracy())


@dataclass(frozen=True, eq=False)
class Summary:
    """A run's plan, what it was made with, and its lines."""

    folder: Path
    plan: RunPlan
    about: dict[str, Any]
    questions: int  # that every line has in full
    lines: list[Line]
    missing: list[Arm] = field(default_factory=list)  # without a finished question

    @property
    def ks(self) -> list[int]:
        """1, 2, 4 … up to n where samples are independent, or to the largest coupled group; and those groups' sizes."""
        most = self.plan.n if 1 in self.plan.coupled else max(self.plan.coupled)
        found = {1, most, *self.plan.coupled} | {2**i for i in range(12) if 2**i <= most}
        return sorted(k for k in found if any(line.sampled.has(k) for line in self.lines))

    @property
    def sizes(self) -> list[int]:
        """The sizes at which sets of samples are compared: those of the coupled groups, n where there are none."""
        return [size for size in self.plan.coupled if size > 1] or [self.plan.n]

    def control(self, line: Line) -> tuple[str, PerQuestion] | None:
        """(what it is, accuracy by question) of a softmax as sharp as this line; None where it does not sharpen.

        Run for it, or read off a sweep of softmax temperatures: where that has the line's mean entropy.
        """
        control = self._controls.get(line.arm)
        for other in self.lines:
            if other.arm == control:
                return str(control), other.sampled.accuracy()
        tau = self.as_sharp(line)
        if tau is None or tau >= SHARPER * (line.temperature or 1.0):
            return None
        sweep = self._sweep(line.arm.coupled, lambda other: other.sampled.accuracy())
        return f"softmax at {tau:.3g}, between its neighbours", matched(sweep, tau)

    def as_sharp(self, line: Line) -> float | None:
        """The temperature at which softmax has this line's mean entropy, read off its sweep; None outside it."""
        base = Arm("softmax", line.arm.coupled)
        sweep = self._sweep(base.coupled, lambda other: other.entropy)
        if line.family == base or len(sweep) < 2:
            return None
        for (cold, low), (hot, high) in pairwise(sorted(sweep.items())):
            if 0 < low <= line.entropy <= high and low < high:
                share = math.log(line.entropy / low) / math.log(high / low)
                return cold * (hot / cold) ** share
        return None

    def _sweep(self, coupled: int, of: Callable[[Line], T]) -> dict[float, T]:
        """Something of every line of softmax, by its temperature."""
        return {
            line.temperature: of(line)
            for line in self.lines
            if line.family == Arm("softmax", coupled) and line.temperature is not None
        }

    def against_control(self, line: Line) -> tuple[str, Interval] | None:
        """(what the control is, accuracy of the line minus the control's)."""
        found = self.control(line)
        return None if found is None else (found[0], paired_difference(line.sampled.accuracy(), found[1]))

    @property
    def families(self) -> dict[Arm, list[Line]]:
        """Lines that differ in their knob alone; a softmax added as a control belongs to the sweep of softmax."""
        found: dict[Arm, list[Line]] = defaultdict(list)
        for line in self.lines:
            found[line.family].append(line)
        return dict(found)

    def against_independent(self, line: Line, k: int) -> tuple[Interval, Interval, Interval] | None:
        """(pass@k, majority@k, distinct answers) of groups of k minus those of as many independent samples.

        None where the line is not coupled or has no such groups, or the same decoder did not draw independent samples.
        """
        twin = Arm(line.arm.decoder)
        for other in self.lines:
            if line.arm.coupled > 1 and k > 1 and line.sampled.has(k) and other.arm == twin:
                a, b = line.sampled, other.sampled
                return (
                    paired_difference(a.pass_at(k), b.pass_at(k)),
                    paired_difference(a.majority_at(k), b.majority_at(k)),
                    paired_difference(a.distinct(k), b.distinct(k)),
                )
        return None

    def area(self, family: Arm, k: int) -> Interval | None:
        """How much more pass@k a family has than softmax at equal pass@1; None where they cannot be compared.

        Softmax with independent samples, or where the run has none, coupled as the family is.
        """
        families = self.families
        base = Arm("softmax", 1 if 1 in self.plan.coupled else family.coupled)
        both = families.get(family, []), families.get(base, [])
        if family == base or k < 2 or min(map(len, both)) < 2 or not all(side[0].sampled.has(k) for side in both):
            return None
        a, b = ([(line.sampled.pass_at(1), line.sampled.pass_at(k)) for line in side] for side in both)
        return area_interval(a, b)

    @cached_property
    def _controls(self) -> dict[Arm, Arm | None]:
        _, _, records = read_run(self.folder)
        return {line.arm: control_of(line.arm, records) for line in self.lines}


def summarise(folder: Path) -> Summary:
    """The numbers of a run's folder, finished or not."""
    plan, about, records = read_run(folder)
    by_arm: dict[Arm, dict[str, dict[int, Record]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        by_arm[record.arm][record.question][record.sample] = record
    whole = {
        arm: {question for question, samples in questions.items() if len(samples) == plan.n}
        for arm, questions in by_arm.items()
    }
    started = [arm for arm, questions in whole.items() if questions]
    shared = sorted(set.intersection(*(whole[arm] for arm in started))) if started else []
    missing = [arm for arm in plan.arms if arm not in started]
    if not shared:
        raise ValueError(f"{folder} holds no question that every decoder has finished: let the run go on first")
    lines = [_line(arm, arm in plan.arms, plan.n, shared, by_arm[arm]) for arm in started]
    return Summary(folder, plan, about, len(shared), lines, missing)


def _line(arm: Arm, asked: bool, n: int, questions: Sequence[str], samples: dict[str, dict[int, Record]]) -> Line:
    table = [[samples[question][i] for i in range(n)] for question in questions]
    flat = [record for row in table for record in row]
    made: Any = decoder(arm.decoder)
    sampled = Sampled(
        tuple(questions),
        torch.tensor([[record.correct for record in row] for row in table]),
        [[record.answer for record in row] for row in table],
        coupled=arm.coupled,
        nested=not made.reads("siblings"),
    )
    count = len(flat)
    return Line(
        arm,
        asked,
        sampled,
        getattr(made, "temperature", None),
        getattr(made, made.knob, None),
        mean_temperature(flat),
        sum(r.entropy * r.tokens for r in flat) / max(1, sum(r.tokens for r in flat)),
        sum(r.tokens for r in flat) / count,
        sum(r.finish == "length" for r in flat) / count,
        sum(r.seconds for r in flat) / count,
    )
