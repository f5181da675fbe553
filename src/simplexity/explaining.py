"""One step under several decoders: the tokens that matter, before and after each, with the certificate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from simplexity.certificate import Certificate
from simplexity.context import Context
from simplexity.decoders import decoder
from simplexity.decoding import Decoder
from simplexity.measures import Description
from simplexity.solvers import MirrorAscent, solve

PAPER = ("greedy", "softmax", "top-k:k=50", "top-p:p=0.9", "sparsemax")
"""The five decoders of the paper with a closed form, at the settings users know."""

DEFAULT = (*PAPER, "bok:temperature=0.7", "bok:temperature=1.0")


@dataclass(frozen=True, eq=False)
class Explained:
    """What one decoder made of the scores."""

    spec: str
    q: Tensor  # [V]
    certificate: Certificate
    description: Description


@dataclass(frozen=True, eq=False)
class Step:
    """One step: the model's p `[V]`, the ids worth showing, best first, their texts, and each decoder's answer."""

    p: Tensor
    ids: list[int]
    texts: list[str]
    decoders: list[Explained]


def explain_step(
    scores: Tensor,
    specs: Sequence[str] = DEFAULT,
    text: Callable[[int], str] = str,
    top: int = 8,
    context: Context | None = None,
) -> Step:
    """Every decoder on one row of scores `[V]`; `context` holds another model's logits, for the decoders of two."""
    answers = []
    for spec in specs:
        chosen = decoder(spec)
        of = (scores, context if chosen.reads("other") else None)
        answers.append(Explained(spec, chosen.distribution(*of), chosen.certify(*of), chosen.describe(*of)))
    ids = scores.topk(min(top, len(scores))).indices.tolist()
    return Step(torch.softmax(scores.float(), -1), ids, [text(i) for i in ids], answers)


def ascent_path(chosen: Decoder, scores: Tensor) -> Tensor | None:
    """The iterates q_0 … q_J `[J+1, V]` of a decoder solved by a fixed number of mirror steps; None for others."""
    problem = chosen.problem(scores)
    method = chosen.method(problem)
    if not isinstance(method, MirrorAscent) or method.steps is None:
        return None
    return torch.stack([solve(problem, replace(method, steps=j)) for j in range(method.steps + 1)])
