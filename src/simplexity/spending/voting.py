"""Self-consistency (Wang et al., 2023): the answer that most samples give, and when to stop asking.

    max  votes(a)   over the answers a, votes(a) = how many of the n samples answer a

A sample without an answer (None) has no vote. With v₁ and v₂ votes for the two leading answers and r samples still to
draw, nothing can change the outcome once v₁ > v₂ + r: an answer not yet seen has no votes and needs more than r.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simplexity.spending.samples import Cost, Sample, cost_of

Answer = Callable[[Sample], str | None]


@dataclass(frozen=True)
class Vote:
    """The outcome: the answer, who shares the lead with it, and what was drawn of the n samples."""

    answer: str | None  # the first seen of the winners; None only where no sample has an answer
    winners: tuple[str | None, ...]  # more than one where they are tied, the first seen first
    share: float  # of the samples drawn, for each winner
    votes: dict[str, int]
    sample: Sample  # the first that gave the answer
    n: int  # samples there would have been
    cost: Cost

    @property
    def saved(self) -> float:
        """The share of the n samples that was not drawn."""
        return 1 - self.cost.samples / self.n


def majority(group: Sequence[Sample], answer: Answer) -> Vote:
    """The vote of a whole group: K samples and as many calls of `answer`.

    >>> group = [Sample(text, (1,)) for text in ("7", "?", "4", "4", "7")]
    >>> found = majority(group, lambda s: None if s.text == "?" else s.text)
    >>> found.answer, found.winners, found.share
    ('7', ('7', '4'), 0.4)
    """
    cost = cost_of(group, len(group))
    return _outcome(group, [answer(sample) for sample in group], len(group), cost)


def vote(
    draw: Callable[[int], Sequence[Sample]],
    answer: Answer,
    n: int,
    at_once: int = 1,
    confidence: float | None = None,
) -> Vote:
    """The vote of n samples, of which no more are drawn than it takes, `at_once` at a time.

    draw:       draw(count) gives that many further samples
    confidence: None stops when the rest cannot change the outcome: answer and winners are those of all n samples.
                A number between ½ and 1 also stops when the leading answer is the commoner of the two leading ones
                with this probability (`ahead`): Adaptive-Consistency (Aggarwal et al., 2023), cheaper, and at times
                another answer.

    >>> def from_the_start():
    ...     texts = iter("aabaaacbab")
    ...     return lambda count: [Sample(next(texts), (1,)) for _ in range(count)]
    >>> found = vote(from_the_start(), lambda s: s.text, n=10)
    >>> found.answer, found.cost.samples, round(found.saved, 2)
    ('a', 7, 0.3)
    >>> vote(from_the_start(), lambda s: s.text, n=10, confidence=0.8).cost.samples
    2
    """
    if n < 1 or at_once < 1:
        raise ValueError(f"n and at_once must be at least 1, got {n} and {at_once}")
    if confidence is not None and not 0.5 < confidence < 1:
        raise ValueError(f"confidence must lie between 0.5 and 1, got {confidence}")
    group: list[Sample] = []
    answers: list[str | None] = []
    calls = 0
    while (left := n - len(group)) and not _decided(answers, left, confidence):
        count = min(at_once, left)
        new = draw(count)
        if len(new) != count:
            raise ValueError(f"draw({count}) gave {len(new)} samples")
        group += new
        answers += [answer(sample) for sample in new]
        calls += 1
    return _outcome(group, answers, n, cost_of(group, calls))


def ahead(first: int, second: int) -> float:
    """The probability that the answer with `first` votes is the commoner of the two, after Aggarwal et al.

    P(B > ½) for B ~ Beta(first + 1, second + 1), the posterior of its share under a uniform prior. With whole numbers
    it is the chance of at most `first` heads in first + second + 1 throws of a coin, hence exact up to one division.

    >>> ahead(0, 0), ahead(1, 0), ahead(4, 0)
    (0.5, 0.75, 0.96875)
    """
    if first < 0 or second < 0:
        raise ValueError(f"votes cannot be negative, got {first} and {second}")
    throws = first + second + 1
    return sum(math.comb(throws, heads) for heads in range(first + 1)) / 2**throws


def _decided(answers: Sequence[str | None], left: int, confidence: float | None) -> bool:
    first, second = (*sorted(_votes(answers).values(), reverse=True), 0, 0)[:2]
    return first > second + left or (confidence is not None and ahead(first, second) >= confidence)


def _votes(answers: Sequence[str | None]) -> Counter[str]:
    """By answer, the first seen first."""
    return Counter(answer for answer in answers if answer is not None)


def _outcome(group: Sequence[Sample], answers: Sequence[str | None], n: int, cost: Cost) -> Vote:
    votes = _votes(answers)
    most = max(votes.values(), default=len(answers))
    winners = tuple(answer for answer, count in votes.items() if count == most) or (None,)
    first = group[answers.index(winners[0])]
    return Vote(winners[0], winners, most / len(answers), dict(votes), first, n, cost)
