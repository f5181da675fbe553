"""What n samples per question say: accuracy, pass@k, majority@k, distinct answers; one value for each question.

    pass@k  =  1 − C(n − c, k) / C(n, k)            c of the n samples are right
    maj@k   =  E over subsets of k [ the mean correctness of the answers that share the most votes ]

Both are expectations over a random subset of k of the n samples, so both are unbiased and neither needs a seed.
The score of a configuration is the mean over its questions.

That holds for independent samples. Where they are coupled in groups of G, a subset is not what the decoder would have
drawn: at k = G a score is the mean of the whole groups' own, and at k = 1 it is as above, since each sample alone is an
exact draw. Evenly spread codes are nested: every second one of eight is a group of four. So a k that divides G is the
mean over those; no other is defined, and none but 1 and G where samples look at who is with them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

from simplexity.evaluation.intervals import PerQuestion

Answers = Sequence[Sequence[str | None]]


@dataclass(frozen=True, eq=False)
class Sampled:
    """The n samples of one configuration for each question, `[questions, n]` throughout.

    `coupled` samples in a row are a group that was drawn together; 1: all are independent. `nested` groups hold smaller
    ones: with d = coupled / k, every d-th sample makes a group of k.

    >>> s = Sampled(("a", "b"), torch.tensor([[True, True, False], [False, False, True]]), [["1", "1", "2"], ["3"] * 3])
    >>> s.accuracy().mean, round(s.pass_at(2).mean, 4), round(s.majority_at(3).mean, 4), s.distinct().mean
    (0.5, 0.8333, 0.6667, 1.5)
    >>> pairs = Sampled(("a",), torch.tensor([[True, False, False, True]]), [["1", "2", "2", "1"]], coupled=2)
    >>> pairs.pass_at(1).mean, pairs.pass_at(2).mean, pairs.has(4)
    (0.5, 1.0, False)
    """

    questions: tuple[str, ...]
    correct: Tensor
    answers: Answers
    entropy: Tensor | None = None
    effective_temperature: Tensor | None = None
    tokens: Tensor | None = None
    seconds: Tensor | None = None
    coupled: int = 1
    nested: bool = False

    def __post_init__(self) -> None:
        _check_table(self.answers, self.correct)
        shape = tuple(self.correct.shape)
        if len(self.questions) != shape[0]:
            raise ValueError(f"{len(self.questions)} question ids for {shape[0]} rows of samples")
        if len(set(self.questions)) < len(self.questions):
            raise ValueError("two questions share an id")
        if self.coupled < 1 or shape[1] % self.coupled:
            raise ValueError(f"{shape[1]} samples of a question are not whole groups of {self.coupled}")
        for name in ("entropy", "effective_temperature", "tokens", "seconds"):
            extra = getattr(self, name)
            if extra is not None and tuple(extra.shape) != shape:
                raise ValueError(f"{name} has the shape {tuple(extra.shape)}, the samples have {shape}")

    def per_question(self, values: Tensor) -> PerQuestion:
        """Values `[questions]` of one's own, with the ids of these questions."""
        return PerQuestion(self.questions, values)

    def accuracy(self) -> PerQuestion:
        """See `accuracy`."""
        return self.per_question(accuracy(self.correct))

    def pass_at(self, k: int) -> PerQuestion:
        """See `pass_at_k`; of coupled samples the mean over groups of exactly k."""
        return self._at(k, lambda _, correct: pass_at_k(correct, k))

    def majority_at(self, k: int) -> PerQuestion:
        """See `majority_at_k`; of coupled samples the mean over groups of exactly k."""
        return self._at(k, lambda answers, correct: majority_at_k(answers, correct, k))

    def distinct(self, k: int | None = None) -> PerQuestion:
        """See `distinct_answers`; of coupled samples the mean over groups of exactly k, which is n unless given."""
        size = self.correct.shape[1] if k is None else k
        return self._at(size, lambda answers, _: distinct_answers(answers, size))

    def has(self, k: int) -> bool:
        """Whether the scores of k samples can be told from these."""
        if self.coupled == 1 or k == 1:
            return 1 <= k <= self.correct.shape[1]
        return k == self.coupled or (self.nested and 1 < k < self.coupled and self.coupled % k == 0)

    def _at(self, k: int, score: Callable[[Answers, Tensor], Tensor]) -> PerQuestion:
        """The score of k samples: over all subsets of independent ones, over whole groups of coupled ones."""
        if self.coupled == 1 or k == 1:
            return self.per_question(score(self.answers, self.correct))
        if not self.has(k):
            sizes = [size for size in range(1, self.coupled + 1) if self.has(size)]
            told = f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
            raise ValueError(f"k = {k} of samples coupled in groups of {self.coupled}: k must be {told}")
        size, apart = self.coupled, self.coupled // k
        places = [range(i + j, i + size, apart) for i in range(0, self.correct.shape[1], size) for j in range(apart)]
        answers = [[row[place] for place in group] for row in self.answers for group in places]
        groups = score(answers, torch.stack([self.correct[:, list(group)] for group in places], 1).flatten(0, 1))
        return self.per_question(groups.reshape(len(self.questions), -1).mean(1))


def accuracy(correct: Tensor) -> Tensor:
    """The share of right samples, `[questions, n] -> [questions]`; its mean is over questions and samples.

    >>> accuracy(torch.tensor([[True, False], [True, True]])).tolist()
    [0.5, 1.0]
    """
    return correct.double().mean(1)


def pass_at_k(correct: Tensor, k: int) -> Tensor:
    """The chance that one of k of the n samples is right, `[questions, n] -> [questions]`; pass@n is the coverage.

    Integers until one last division, hence correctly rounded for every n.

    >>> pass_at_k(torch.tensor([[True, False, False, False], [True, True, True, False]]), 2).tolist()
    [0.5, 1.0]
    """
    n = correct.shape[1]
    _check_k(k, n)
    return torch.tensor([_drawn(n, c, k) for c in correct.bool().sum(1).tolist()], dtype=torch.float64)


def distinct_answers(answers: Answers, k: int | None = None) -> Tensor:
    """How many different answers k of the n samples are expected to hold (k = n unless given), `[questions]`.

    A sample without an answer (None) counts for none.

    >>> distinct_answers([["1", "2", "2", None]]).tolist(), distinct_answers([["1", "2", "2", None]], 1).tolist()
    ([2.0], [0.75])
    """
    found = []
    for row in answers:
        n = len(row)
        size = n if k is None else k
        _check_k(size, n)
        counts = Counter(answer for answer in row if answer is not None)
        found.append(math.fsum(_drawn(n, c, size) for c in counts.values()))
    return torch.tensor(found, dtype=torch.float64)


def majority_at_k(answers: Answers, correct: Tensor, k: int) -> Tensor:
    """The expected correctness of the majority vote of k of the n samples, `[questions]`.

    Votes are counted on equal answers; tied answers win with equal chances; None wins only where all k are None.
    An answer is as correct as its samples are on average, should the grader have judged them differently.

    Exact up to rounding for every n and k, with neither subsets nor draws: the votes of the answers in a random
    subset are independent binomials given that they sum to k, so for each winning number of votes t a convolution
    over the answers that can reach t gives the chance of every number of ties.

    >>> rows = [["1", "1", "2"], ["1", None, None]]
    >>> right = torch.tensor([[True, True, False], [True, False, False]])
    >>> [[round(x, 4) for x in majority_at_k(rows, right, k).tolist()] for k in (1, 2, 3)]
    [[0.6667, 0.3333], [0.6667, 0.6667], [1.0, 1.0]]
    """
    _check_table(answers, correct)
    _check_k(k, correct.shape[1])
    rows = zip(answers, correct.bool().tolist(), strict=True)
    return torch.tensor([_vote(*_tally(*row), k) for row in rows], dtype=torch.float64)


def _check_k(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k = {k} of n = {n} samples: k must lie between 1 and n")


def _check_table(answers: Answers, correct: Tensor) -> None:
    if correct.ndim != 2:
        raise ValueError(f"correct must be [questions, n], not of shape {tuple(correct.shape)}")
    questions, n = correct.shape
    if len(answers) != questions or any(len(row) != n for row in answers):
        raise ValueError(f"answers must be {questions} rows of {n}, as correct is")


@lru_cache(maxsize=4096)
def _drawn(n: int, c: int, k: int) -> float:
    """The chance that k of n hold at least one of c."""
    total = math.comb(n, k)
    return (total - math.comb(n - c, k)) / total


Tally = tuple[int, float]  # votes among the n samples, mean correctness


def _tally(answers: Sequence[str | None], correct: Sequence[bool]) -> tuple[tuple[Tally, ...], Tally]:
    """Every answer's votes and correctness, most votes first, and those of None."""
    votes, right = Counter(answers), Counter[str | None]()
    for answer, good in zip(answers, correct, strict=True):
        right[answer] += bool(good)
    found = sorted(((c, right[a] / c) for a, c in votes.items() if a is not None), reverse=True)
    return tuple(found), (votes[None], right[None] / max(1, votes[None]))


@lru_cache(maxsize=4096)
def _vote(tallies: tuple[Tally, ...], blank: Tally, k: int) -> float:
    """The expected correctness of the vote of k, see `majority_at_k`."""
    graded = {good for _, good in tallies} | ({blank[1]} if blank[0] >= k else set())
    if len(graded) == 1:
        return graded.pop()  # whoever wins is as right: exact, and quick where no sample is right
    n = blank[0] + sum(c for c, _ in tallies)
    fewest = max(1, math.ceil((k - blank[0]) / len(tallies)))  # votes the winner has at least
    most = min(k, tallies[0][0])
    given = _binomial(n, k / n, k)[k].item()
    won = math.fsum(_won_with(t, tallies, n, k) for t in range(fewest, most + 1)) / given
    return min(1.0, won + blank[1] * math.comb(blank[0], k) / math.comb(n, k))


def _won_with(t: int, tallies: tuple[Tally, ...], n: int, k: int) -> float:
    """Σ over tie sizes r of P(r answers share the lead with t votes, k votes in all) · their mean correctness.

    `state[0, r, v]` is the chance of r leaders and v votes so far, `state[1, r, v]` the same times the sum of the
    leaders' correctness. Answers that cannot reach t do not differ from None and enter as one binomial.
    """
    rivals = [tally for tally in tallies if tally[0] >= t]
    ties = min(len(rivals), k // t)
    state = torch.zeros(2, ties + 1, k + 1, dtype=torch.float64)
    state[0, 0] = _binomial(n - sum(c for c, _ in rivals), k / n, k)
    for c, good in rivals:
        chance = _binomial(c, k / n, t)
        flat = pad(state.view(-1, 1, k + 1), (t - 1, 0))
        after = conv1d(flat, chance[:t].flip(0).view(1, 1, -1)).view_as(state)
        lead = state[:, :-1, : k + 1 - t] * chance[t]
        lead[1] += good * lead[0]
        after[:, 1:, t:] += lead
        state = after
    return (state[1, 1:, k] / torch.arange(1, ties + 1)).sum().item()


def _binomial(n: int, p: float, most: int) -> Tensor:
    """The chances of 0 … most successes in n trials, `[most + 1]`, float64."""
    s = torch.arange(most + 1, dtype=torch.float64)
    rest = (n - s).clamp_min(0)
    ways = math.lgamma(n + 1) - torch.lgamma(s + 1) - torch.lgamma(rest + 1)
    win, miss = torch.tensor([[p], [1 - p]], dtype=torch.float64)
    return torch.where(s <= n, (ways + torch.xlogy(s, win) + torch.xlogy(rest, miss)).exp(), 0.0)
