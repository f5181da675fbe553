"""A sample: one text with what it cost to write and how likely it was. K of them for one prompt are a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from simplexity.engines.transformers import Generated


@dataclass(frozen=True)
class Sample:
    """One text of a group; log q and log p are sums over its tokens, None where nobody recorded them."""

    text: str
    tokens: tuple[int, ...]  # the end token included
    log_q: float | None = None  # under the decoder that drew it
    log_p: float | None = None  # under the model at temperature 1
    finished: bool = True  # ended by itself, not cut at the limit


@dataclass(frozen=True)
class Cost:
    """What a choice was made from."""

    samples: int  # drawn
    tokens: int  # drawn with them, or read by the model in a search
    calls: int  # of the scorer, the term, the answer; of `draw` in a vote; of the model in a search


def samples(tokenizer: Any, generated: Generated, n: int | None = None) -> list[tuple[Sample, ...]]:
    """The groups of `engines.transformers.generate(..., n=n, trace=True)`, one for each prompt.

    tokenizer: a tokenizer of transformers, or a `LanguageModel` that has one
    n:         samples of a prompt, side by side; all are of one prompt unless given

    Without a trace of every token the samples have neither log q nor log p.
    """
    rows = len(generated.tokens)
    n = rows if n is None else n
    if n < 1 or rows % n:
        raise ValueError(f"{rows} texts are not groups of n = {n}")
    decode = getattr(tokenizer, "tokenizer", tokenizer).decode
    lengths, finished = generated.lengths.tolist(), generated.finished.tolist()
    ids = [tuple(row[:end]) for row, end in zip(generated.tokens.tolist(), lengths, strict=True)]
    log_q, log_p = _sums(generated, generated.log_q), _sums(generated, generated.log_p)
    found = [
        Sample(decode(list(ids[i]), skip_special_tokens=True), ids[i], log_q[i], log_p[i], finished[i])
        for i in range(rows)
    ]
    return [tuple(found[start : start + n]) for start in range(0, rows, n)]


def cost_of(group: Sequence[Sample], calls: int) -> Cost:
    """The cost of a group that was drawn as a whole; an empty one is refused.

    >>> cost_of([Sample("a", (5, 2)), Sample("b", (7, 8, 2))], calls=2)
    Cost(samples=2, tokens=5, calls=2)
    """
    if not group:
        raise ValueError("the group is empty: give at least one sample")
    return Cost(len(group), sum(len(sample.tokens) for sample in group), calls)


def _sums(generated: Generated, steps: Tensor | None) -> Sequence[float | None]:
    if steps is None or steps.shape != generated.tokens.shape:  # a trace of every so many steps adds up to nothing
        return [None] * len(generated.tokens)
    return steps.double().sum(-1).tolist()
