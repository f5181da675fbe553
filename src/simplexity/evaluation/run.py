"""A run: every decoder on every question, graded while the model writes on, and resumed where it was stopped."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self

import torch

import simplexity
from simplexity.decoders import decoder
from simplexity.evaluation.arms import Arm
from simplexity.evaluation.plan import RunPlan, Work, batches, fingerprint
from simplexity.evaluation.records import Ledger, Record
from simplexity.evaluation.task import Grade, Grader, Task
from simplexity.evaluation.written import Written

SHARPER = 0.97  # of its own temperature: below, a decoder sharpens, and gets a softmax of the same sharpness beside it
TOGETHER = 4  # batches graded in one call at most: what is not on disk yet is lost to a kill
# seconds: whenever the thread of the model has waited for its GPU it waits this long for that of the grader, too
SWITCH = 1e-4


class Writer(Protocol):
    """Writes batches, one after the other or several at once, in any order."""

    def write_all(self, works: Iterable[Work]) -> Iterator[tuple[Work, Written]]:
        """Every batch with its texts."""
        ...


@dataclass
class Breakdown:
    """Where the seconds of a run went."""

    forward: float = 0.0
    looking: float = 0.0
    writing: float = 0.0  # all of it, the two above included
    waiting: float = 0.0  # for the grader, while the model could have been writing
    swept: int = 0  # rows that a GPU's fused kernels had to read again and again
    rows: int = 0  # that they solved

    def shares(self) -> dict[str, float]:
        """As parts of the whole."""
        whole = (self.writing + self.waiting) or 1.0
        return {
            "forward": self.forward / whole,
            "draws and bookkeeping": (self.writing - self.forward - self.looking) / whole,
            "measuring entropy": self.looking / whole,
            "waiting for grades": self.waiting / whole,
        }


@dataclass
class Progress:
    """Told of everything that happens; a front end replaces what it wants to show."""

    planned: Callable[[str, int, int], None] = field(default=lambda spec, done, batches: None)
    finished: Callable[[str, int], None] = field(default=lambda spec, rows: None)


def evaluate(
    plan: RunPlan, task: Task, folder: Path, writer: Callable[[], Writer], progress: Progress | None = None
) -> Breakdown:
    """Do what is left of the plan; the folder then holds a record for every sample."""
    progress = progress or Progress()
    questions = task.load(None if plan.data is None else Path(plan.data), plan.limit)
    times, made = Breakdown(), None
    with (
        Ledger(folder, plan, fingerprint(questions), about(plan.engine)) as ledger,
        task.grader() as grader,
        Grading(ledger, grader, times, progress) as grading,
    ):
        for arm in arms(plan, ledger, grading.wait):
            done = ledger.done()
            todo = [w for w in batches(plan, arm, questions) if (arm, w.number) not in done]
            progress.planned(str(arm), math.ceil(len(questions) / (plan.batch // plan.n)) - len(todo), len(todo))
            if todo:
                made = made or writer()  # a finished run needs no model
                for work, written in made.write_all(todo):
                    grading.add(work, written)
    return times


def arms(plan: RunPlan, ledger: Ledger, wait: Callable[[], None] = lambda: None) -> Iterator[Arm]:
    """Those asked for, then a softmax of the same mean effective temperature and coupling for each that sharpens.

    How sharp they are is known when their records are there: `wait` returns then.
    """
    yield from plan.arms
    if not plan.controls:
        return
    wait()
    named = set(plan.arms)
    for arm in plan.arms:
        control = control_of(arm, ledger.records)
        if control is not None and control not in named:
            named.add(control)
            yield control


def control_of(arm: Arm, records: Sequence[Record]) -> Arm | None:
    """The softmax to hold an arm against: as sharp on average, and coupled alike; None where it does not sharpen."""
    chosen: Any = decoder(arm.decoder)
    mean = mean_temperature([r for r in records if r.arm == arm])
    if chosen.name in ("softmax", "greedy") or mean is None:
        return None
    if mean >= SHARPER * getattr(chosen, "temperature", 1.0):
        return None
    spec = str(decoder({"decoder": "softmax", "temperature": float(f"{max(mean, 0.01):.3g}")}))
    return Arm(spec, arm.coupled)


def mean_temperature(records: Sequence[Record]) -> float | None:
    """The effective temperature, mean over texts by their length; None where it is not known of any."""
    taus = [(r.effective_temperature, r.tokens) for r in records if r.effective_temperature is not None]
    return sum(tau * tokens for tau, tokens in taus) / sum(tokens for _, tokens in taus) if taus else None


class Grading:
    """Grades batches in their order while the model writes on, and puts them on disk as soon as they are graded.

    What has come meanwhile is graded together: a text that takes its time then holds up one call, not each batch.
    """

    def __init__(self, ledger: Ledger, grader: Grader, times: Breakdown, progress: Progress) -> None:
        self.ledger, self.grader, self.times, self.progress = ledger, grader, times, progress
        self.pool = ThreadPoolExecutor(1)
        self.pending: deque[Future[None]] = deque()
        self.queue: deque[tuple[Work, Written]] = deque()
        self.known: dict[tuple[str, str], Grade] = {}  # cold decoders write the same text again and again

    def __enter__(self) -> Self:
        self.interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
            elif issubclass(kind, Exception):  # what is written is kept; only who interrupts does not want to wait
                wait(self.pending)
        finally:
            sys.setswitchinterval(self.interval)
            self.pool.shutdown(cancel_futures=True)

    def add(self, work: Work, written: Written) -> None:
        """One more batch; what went wrong with an earlier one is raised here."""
        self.times.forward += written.forward
        self.times.looking += written.looking
        self.times.swept += written.swept
        self.times.rows += written.rows
        self.times.writing += written.seconds
        while self.pending and self.pending[0].done():
            self.pending.popleft().result()
        self.queue.append((work, written))
        self.pending.append(self.pool.submit(self._keep))

    def wait(self) -> None:
        """Return when everything is graded."""
        start = time.perf_counter()
        while self.pending:
            self.pending.popleft().result()
        self.times.waiting += time.perf_counter() - start

    def _keep(self) -> None:
        """What is there; nothing where the calls before have taken it."""
        taken = [self.queue.popleft() for _ in range(min(TOGETHER, len(self.queue)))]
        try:
            self._grade(taken)
        except Exception:
            # those that can be graded are kept; the error itself is raised below, and ends the run
            for one in taken if len(taken) > 1 else []:
                with suppress(Exception):
                    self._grade([one])
                    self._record(*one)
            raise
        for one in taken:
            self._record(*one)

    def _grade(self, batches: list[tuple[Work, Written]]) -> None:
        """Know the grade of every text in them."""
        pairs = [(work.questions[t.question], t.text) for work, written in batches for t in written.texts]
        new = {(question.id, text): (question, text) for question, text in pairs}
        new = {key: pair for key, pair in new.items() if key not in self.known}
        if new:
            self.known |= zip(new, self.grader.grade(list(new.values())), strict=True)

    def _record(self, work: Work, written: Written) -> None:
        grades = [self.known[work.questions[t.question].id, t.text] for t in written.texts]
        self.ledger.append(work, records(work, written, grades))
        self.progress.finished(str(work.arm), len(written.texts))


def records(work: Work, written: Written, grades: Sequence[Grade]) -> list[Record]:
    """The records of a batch."""
    share = round(written.seconds / len(written.texts), 4)
    return [
        Record(
            work.arm.decoder, work.number, work.questions[text.question].id, text.sample, text.seed, text.text,
            text.tokens, text.finish, text.entropy, text.effective_temperature, grade.correct, grade.answer,
            grade.reason, share, work.arm.coupled, work.arm.group(text.sample),
        )
        for text, grade in zip(written.texts, grades, strict=True)
    ]  # fmt: skip


def about(engine: str) -> dict[str, Any]:
    """What a run was made with."""
    import transformers

    # it may be on a cluster's machines alone
    engines = [import_module(engine)] if engine != "transformers" and find_spec(engine) is not None else []
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {m.__name__: m.__version__ for m in (simplexity, torch, transformers, *engines)},
    }
