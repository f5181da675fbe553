"""Penalties on tokens that were there before: a change of the scores, made before any problem is stated.

    s' = s / repetition where s > 0, s · repetition where s <= 0      (Keskar et al., 2019, as in transformers)
    s' = s' − presence − frequency·count                              (OpenAI's API, llama.cpp)

for the tokens in the text so far, the others keep their scores.
"""

import torch
from torch import Tensor

from simplexity.rows import covers, per_row


def penalise(
    scores: Tensor,
    tokens: Tensor | None,
    repetition: float | Tensor | None = None,
    presence: float | Tensor | None = None,
    frequency: float | Tensor | None = None,
    last: int | Tensor | None = None,
) -> Tensor:
    """s' `[..., V]`, without host synchronisation; numbers may be one per row.

    tokens: `[..., T]` the text so far; an id outside the vocabulary, such as the padding −1, counts for nothing
    last:   how many of them count, from the end; absent: all

    >>> penalise(torch.tensor([3.0, -1.0, 1.0]), torch.tensor([0, 1, 1]), repetition=2.0, frequency=0.5)
    tensor([ 1., -3.,  1.])
    """
    if repetition is None and presence is None and frequency is None:
        return scores
    if tokens is None:
        raise ValueError("a penalty needs the tokens so far: pass context=Context(tokens=…)")
    rows, size = scores.shape[:-1], scores.shape[-1]
    if tokens.is_floating_point() or tokens.ndim == 0 or not covers(tokens.shape[:-1], rows):
        raise ValueError(
            f"context.tokens must be whole numbers {[*rows, 'T']}, got {tokens.dtype} {list(tokens.shape)}"
        )
    ids = tokens.to(scores.device, torch.int64)
    counted = (ids >= 0) & (ids < size)
    if last is not None:
        place = torch.arange(ids.shape[-1], 0, -1, device=ids.device)  # 1 is the last token
        counted = counted & (place <= per_row(last, scores, "last"))
    ids = torch.where(counted, ids, size).expand(*rows, ids.shape[-1])
    counts = scores.new_zeros(*rows, size + 1).scatter_add_(-1, ids, scores.new_ones(1).expand_as(ids))[..., :-1]
    changed = scores
    if repetition is not None:
        r = per_row(repetition, scores, "repetition")
        changed = torch.where(scores > 0, scores / r, scores * r)
    if presence is not None:
        changed = changed - per_row(presence, scores, "presence")
    if frequency is not None:
        changed = changed - per_row(frequency, scores, "frequency") * counts
    return torch.where(counts > 0, changed, scores)
