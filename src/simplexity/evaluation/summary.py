"""A run in numbers: one line for each decoder, its matched control beside it, and its family's frontier."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from simplexity.decoders import decoder
from simplexity.evaluation.frontier import area_interval, matched
from simplexity.evaluation.intervals import Interval, PerQuestion, interval, paired_difference
from simplexity.evaluation.plan import RunPlan
from simplexity.evaluation.records import Record, read_run
from simplexity.evaluation.run import control_of, mean_temperature
from simplexity.evaluation.scores import Sampled


@dataclass(frozen=True, eq=False)
class Line:
    """One decoder's samples and what they say."""

    spec: str
    asked: bool  # False: a control that the run added
    sampled: Sampled
    temperature: float | None  # its own parameter
    effective_temperature: float | None
    entropy: float
    tokens: float  # mean length of a text
    cut: float  # share of texts that the limit ended
    seconds: float  # per text

    @cached_property
    def family(self) -> str:
        """The decoder without its temperature: what a sweep of that knob has in common."""
        found: Any = decoder(self.spec)
        if self.temperature is None:
            return self.spec
        return str(decoder(found.to_json() | {"temperature": 1.0}))

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
    missing: list[str] = field(default_factory=list)  # decoders without a finished question

    @property
    def ks(self) -> list[int]:
        """1, 2, 4 … up to n."""
        return sorted({2**i for i in range(12) if 2**i <= self.plan.n} | {self.plan.n})

    def control(self, line: Line) -> tuple[str, PerQuestion] | None:
        """(what it is, accuracy by question) of a softmax as sharp as this line; None where it does not sharpen.

        Run for it, or read off a sweep of softmax temperatures that lies around it.
        """
        name = self._controls.get(line.spec)
        if name is None:
            return None
        for other in self.lines:
            if other.spec == name:
                return name, other.sampled.accuracy()
        sweep = {
            other.temperature: other.sampled.accuracy()
            for other in self.lines
            if other.family == "softmax" and other.temperature is not None
        }
        tau = line.effective_temperature
        if tau is None or len(sweep) < 2 or not min(sweep) <= tau <= max(sweep):
            return None
        return f"softmax at {tau:.3g}, between its neighbours", matched(sweep, tau)

    def against_control(self, line: Line) -> tuple[str, Interval] | None:
        """(what the control is, accuracy of the line minus the control's)."""
        found = self.control(line)
        return None if found is None else (found[0], paired_difference(line.sampled.accuracy(), found[1]))

    @property
    def families(self) -> dict[str, list[Line]]:
        """Lines that differ in temperature alone; a softmax added as a control belongs to the sweep of softmax."""
        found: dict[str, list[Line]] = defaultdict(list)
        for line in self.lines:
            found[line.family].append(line)
        return dict(found)

    def area(self, family: str, k: int, base: str = "softmax") -> Interval | None:
        """How much more pass@k a family has than the base at equal pass@1; None where they cannot be compared."""
        families = self.families
        if family == base or len(families.get(family, [])) < 2 or len(families.get(base, [])) < 2 or k < 2:
            return None
        points = [
            [(line.sampled.pass_at(1), line.sampled.pass_at(k)) for line in families[name]] for name in (family, base)
        ]
        return area_interval(points[0], points[1])

    @cached_property
    def _controls(self) -> dict[str, str | None]:
        _, _, records = read_run(self.folder)
        return {line.spec: control_of(line.spec, records) for line in self.lines}


def summarise(folder: Path) -> Summary:
    """The numbers of a run's folder, finished or not."""
    plan, about, records = read_run(folder)
    by_spec: dict[str, dict[str, dict[int, Record]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        by_spec[record.decoder][record.question][record.sample] = record
    whole = {
        spec: {question for question, samples in questions.items() if len(samples) == plan.n}
        for spec, questions in by_spec.items()
    }
    started = [spec for spec, questions in whole.items() if questions]
    shared = sorted(set.intersection(*(whole[spec] for spec in started))) if started else []
    missing = [spec for spec in plan.decoders if spec not in started]
    if not shared:
        raise ValueError(f"{folder} holds no question that every decoder has finished: let the run go on first")
    lines = [_line(spec, spec in plan.decoders, plan.n, shared, by_spec[spec]) for spec in started]
    return Summary(folder, plan, about, len(shared), lines, missing)


def _line(spec: str, asked: bool, n: int, questions: Sequence[str], samples: dict[str, dict[int, Record]]) -> Line:
    table = [[samples[question][i] for i in range(n)] for question in questions]
    flat = [record for row in table for record in row]
    sampled = Sampled(
        tuple(questions),
        torch.tensor([[record.correct for record in row] for row in table]),
        [[record.answer for record in row] for row in table],
    )
    made: Any = decoder(spec)
    count = len(flat)
    return Line(
        spec,
        asked,
        sampled,
        getattr(made, "temperature", None),
        mean_temperature(flat),
        sum(r.entropy * r.tokens for r in flat) / max(1, sum(r.tokens for r in flat)),
        sum(r.tokens for r in flat) / count,
        sum(r.finish == "length" for r in flat) / count,
        sum(r.seconds for r in flat) / count,
    )
