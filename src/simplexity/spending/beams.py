"""Beam search as what it searches for.

    max  log p(y) − λ·R(y) + length·|y| + term(y)   over texts y that end, or have max_new_tokens tokens

R is one of `evenness.REGULARISERS` or one's own. A text so far is ranked by the same objective without the term, and
only the best `beams` go on: exact when `beams` is the number of all beginnings, else a search that may miss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from simplexity.spending.evenness import REGULARISERS, Regulariser, Surprisals
from simplexity.spending.samples import Cost

Step = Callable[[Tensor, Tensor], Tensor]
"""step(tokens, parents): the log-probabilities `[rows, V]` of what follows the texts so far `[rows, t]`;
parents `[rows]` are the rows of the call before that they continue."""

ABOVE = 1e-4  # what rounding may put a log-probability above 0


@dataclass(frozen=True)
class Searched:
    """The best text found."""

    tokens: tuple[int, ...]  # the end token included
    score: float  # the objective
    log_p: float
    finished: bool  # it has ended, it was not cut at max_new_tokens
    cost: Cost


def beam_search(
    step: Step,
    beams: int,
    max_new_tokens: int,
    ends: Sequence[int],
    lam: float = 0.0,
    regulariser: str | Regulariser | None = None,
    length: float = 0.0,
    term: Callable[[tuple[int, ...]], float] | None = None,
) -> Searched:
    """The best text by beam search; a call of `step` for each token of the longest, `beams` rows at most in each.

    A text that has ended is set aside where it is among the `beams` best of its step, and takes no place from those
    that go on. One cut at max_new_tokens counts as it stands. The search stops when no text that goes on can beat the
    best one set aside: a further token never raises log p, R is at least 0 (at least what it is, where it grows), and
    a positive `length` is gained at most until max_new_tokens. Equal scores: the text found first, lower ids first.

    ends:   tokens that end a text
    length: what each token is worth, the end token included; log p alone favours short texts
    term:   of a whole text's tokens; asked only of texts set aside, so that it chooses among them and does not steer.
            Nothing bounds it, hence with a term the search always goes on to max_new_tokens. −inf forbids a text

    >>> tree = torch.tensor([[0.6, 0.4, 0.0], [0.1, 0.1, 0.8]]).log()  # the first token, then the second; 2 ends
    >>> found = beam_search(lambda tokens, parents: tree[tokens.shape[1]].expand(len(tokens), 3), 2, 2, ends=[2])
    >>> found.tokens, round(found.log_p, 3), found.cost
    ((0, 2), -0.734, Cost(samples=0, tokens=3, calls=2))
    """
    rule = _checked(beams, max_new_tokens, lam, regulariser, length)
    tokens, parents, past = torch.empty(1, 0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), Surprisals.none()
    best: Searched | None = None
    calls = read = 0
    for t in range(1, max_new_tokens + 1):
        log_p = _log_probabilities(step(tokens, parents), len(tokens), ends)
        calls, read = t, read + len(tokens)
        past, size = past.to(log_p.device), log_p.shape[1]
        whole = log_p - past.chosen.sum(-1, keepdim=True)
        penalty = _penalty(rule, lam, past, log_p)
        value = (whole - penalty + length * t).masked_fill_(log_p == -math.inf, -math.inf)
        for place in _best(value, beams).tolist():
            row, token = divmod(place, size)
            if token not in ends and t < max_new_tokens:
                continue
            text = (*tokens[row].tolist(), token)
            score = value[row, token].item() + (0.0 if term is None else _term(term, text))
            if score > (-math.inf if best is None else best.score):
                best = Searched(text, score, whole[row, token].item(), token in ends, Cost(0, 0, 0))
        if t == max_new_tokens:
            break
        value[:, list(ends)] = -math.inf
        kept = _best(value, beams)
        if not len(kept):
            break
        parents, new = kept // size, kept % size
        if best is not None and term is None:
            ahead = length * (max_new_tokens if length > 0 else t + 1)
            least = penalty[parents, new] if rule is not None and rule.grows else 0.0
            if (whole[parents, new] - least + ahead).max().item() <= best.score:
                break
        past = past.extended(-log_p, parents, new)
        tokens = torch.cat([tokens.to(log_p.device)[parents], new.unsqueeze(-1)], -1)
    if best is None:
        raise ValueError("no text was found: each one has probability 0 or is forbidden by the term")
    return replace(best, cost=Cost(0, read, calls))


def beam(
    model: Any,
    input_ids: Tensor,
    beams: int = 4,
    max_new_tokens: int = 128,
    ends: Sequence[int] | None = None,
    attention_mask: Tensor | None = None,
    **objective: Any,
) -> Searched:
    """Beam search with a causal language model of transformers, from one prompt `[1, length]`.

    The model reads the prompt once and each token of each beam once; its cache follows the beams. `ends` are those of
    the model's generation_config unless given; `attention_mask` is 0 where the prompt is padded; `objective` is lam,
    regulariser, length and term of `beam_search`.
    """
    from simplexity.engines.other_model import OtherModel, Reading
    from simplexity.engines.transformers import check_room

    if input_ids.ndim != 2 or len(input_ids) != 1:
        raise ValueError(f"beam searches from one prompt, input_ids [1, length], got {list(input_ids.shape)}")
    check_room(model, input_ids.shape[1], max_new_tokens, "the")
    if ends is None:
        own = model.generation_config.eos_token_id
        ends = [] if own is None else own if isinstance(own, list) else [own]
    reading = Reading(OtherModel(model, input_ids, attention_mask), 1)

    def step(tokens: Tensor, parents: Tensor) -> Tensor:
        # a cache left as it is grows in place
        if parents.tolist() != list(range(len(reading.mask))):
            reading.cache.reorder_cache(parents)  # pyright: ignore[reportArgumentType]
            reading.mask = reading.mask[parents]
        return reading.after(tokens).log_softmax(-1)

    found = beam_search(step, beams, max_new_tokens, ends, **objective)
    # the first call read all of the prompt
    return replace(found, cost=replace(found.cost, tokens=found.cost.tokens + input_ids.shape[1] - 1))


def _checked(
    beams: int, max_new_tokens: int, lam: float, regulariser: str | Regulariser | None, length: float
) -> Regulariser | None:
    """The regulariser that counts, None without one."""
    if beams < 1 or max_new_tokens < 1:
        raise ValueError(f"beams and max_new_tokens must be at least 1, got {beams} and {max_new_tokens}")
    if not 0 <= lam < math.inf:
        raise ValueError(f"lam must be a finite number >= 0, got {lam}")
    if not math.isfinite(length):
        raise ValueError(f"length must be a finite number, got {length}")
    if isinstance(regulariser, str):
        if regulariser not in REGULARISERS:
            raise ValueError(f"unknown regulariser {regulariser!r}: there are {', '.join(REGULARISERS)}")
        regulariser = REGULARISERS[regulariser]
    if lam and regulariser is None:
        raise ValueError(f"lam = {lam} needs a regulariser: {', '.join(REGULARISERS)}, or one of your own")
    return regulariser if lam else None


def _log_probabilities(found: Tensor, rows: int, ends: Sequence[int]) -> Tensor:
    if found.ndim != 2 or len(found) != rows:
        raise ValueError(f"step must give log-probabilities [{rows}, V], got {list(found.shape)}")
    for end in ends:
        if not 0 <= end < found.shape[1]:
            raise ValueError(f"the end token {end} is none of the {found.shape[1]} tokens")
    if not bool((found <= ABOVE).all()):
        raise ValueError("step must give log-probabilities, none of them NaN or above 0")
    return found.double()


def _penalty(rule: Regulariser | None, lam: float, past: Surprisals, log_p: Tensor) -> Tensor:
    """λ·R of every text longer by one token, `[rows, V]`."""
    if rule is None:
        return torch.zeros_like(log_p)
    found = rule.after(past, -log_p)
    if not bool(((found >= 0) | (log_p == -math.inf)).all()):
        raise ValueError("the regulariser gave NaN or less than 0: R must be at least 0, or no search could stop early")
    return lam * found


def _term(term: Callable[[tuple[int, ...]], float], text: tuple[int, ...]) -> float:
    value = float(term(text))
    if math.isnan(value) or value == math.inf:
        raise ValueError(f"the term gave {value} for the tokens {text}: it must be a number below infinity")
    return value


def _best(value: Tensor, count: int) -> Tensor:
    """Where the `count` best finite values lie in value `[rows, V]`, flat, the best first, at ties the first place."""
    flat = value.flatten()
    bar = flat.topk(min(count, len(flat))).values[-1]
    places = ((flat >= bar) & (flat > -math.inf)).nonzero().squeeze(-1)
    return places[flat[places].sort(descending=True, stable=True).indices[:count]]
