"""Arithmetic on rows: every tensor here is `[..., V]`, one row of scores or probabilities per request."""

import math
from functools import cache
from numbers import Integral, Real
from typing import Any, TypeGuard

import torch
from torch import Tensor

FLOORS = {  # where exp is safely a normal number, and what it is a little above there
    dtype: (math.log(torch.finfo(dtype).tiny) + 0.5, 2 * torch.finfo(dtype).tiny)
    for dtype in (torch.float32, torch.float64)
}
BLOCK = 128  # short enough that float32 sums inside a block keep 1e-7, a divisor of many vocabularies
ONE_BY_ONE = 2**14  # booleans that are looked at sooner than arranged
FEW = 256  # numbers over which a call takes longer than its arithmetic
IN_CACHE = 2**17  # numbers that stay in the cache of one core


def as_working(scores: Tensor) -> Tensor:
    """Scores in the dtype the arithmetic runs in, detached: float64 stays, half precision becomes float32."""
    if not isinstance(scores, Tensor):
        raise ValueError(f"scores must be a torch.Tensor, got {type(scores).__name__}")
    if not scores.is_floating_point():
        raise ValueError(f"scores must be floating point, got {scores.dtype}: pass scores.float()")
    if scores.ndim == 0 or scores.shape[-1] == 0:
        raise ValueError(f"scores must be [..., V] with V >= 1, got shape {list(scores.shape)}")
    scores = scores.detach() if scores.requires_grad else scores
    return scores if scores.dtype in (torch.float32, torch.float64) else scores.float()


def per_row(parameter: "Real | float | Tensor", like: Tensor, name: str) -> "float | Tensor":
    """A number as it is; a tensor `[...]` or `[..., 1]` as `[..., 1]`, one value for each row of `like`.

    >>> per_row(torch.tensor([1.0, 2.0]), torch.zeros(2, 5), "lam").shape
    torch.Size([2, 1])
    """
    if not isinstance(parameter, Tensor):
        return float(parameter)
    if parameter.ndim == 0:
        column = parameter.reshape((1,) * like.ndim)
    elif parameter.ndim == like.ndim and parameter.shape[-1] == 1:
        column = parameter
    else:
        column = parameter.unsqueeze(-1)
    rows = like.shape[:-1]
    if column.ndim != like.ndim or not covers(column.shape[:-1], rows):
        raise ValueError(
            f"{name} must be a number or one value per row, shape {list(rows)} or {[*rows, 1]}, "
            f"got shape {list(parameter.shape)}"
        )
    return column.to(like.device, like.dtype) if column.is_floating_point() else column.to(like.device)


def covers(shape: torch.Size, rows: torch.Size) -> bool:
    """Whether a tensor with these leading dimensions holds one entry, or a shared one, for each row."""
    pairs = zip(reversed(shape), reversed(rows), strict=False)
    return len(shape) <= len(rows) and all(own in (1, there) for own, there in pairs)


def fits(x: Tensor, scores: Tensor) -> bool:
    """Whether x is `[..., V]`, with an entry, or a shared one, for each of the scores."""
    return x.ndim > 0 and x.shape[-1] == scores.shape[-1] and covers(x.shape[:-1], scores.shape[:-1])


@cache
def block_length(size: int) -> int:
    """A divisor of `size` between 128 and 255 that is a multiple of 8 (see `places`), or 128 where there is none."""
    return next((b for b in range(BLOCK, 2 * BLOCK, 8) if size % b == 0), BLOCK)


def in_blocks(x: Tensor, fill: float = 0.0) -> Tensor:
    """`[..., V]` as `[..., V/b, b]`, padded with `fill` where no short divisor b of V exists."""
    size, block = x.shape[-1], block_length(x.shape[-1])
    if size % block:
        x = torch.nn.functional.pad(x, (0, block - size % block), value=fill)
    return x.reshape(*x.shape[:-1], -(-size // block), block)


def total(x: Tensor) -> Tensor:
    """Row sums in float64, `[..., 1]`.

    One running float32 sum over a large vocabulary loses 1e-5; short blocks summed in float32 and
    then added in float64 lose 1e-7 at the cost of a single pass.
    """
    if x.dtype == torch.float64 or x.shape[-1] < 4 * BLOCK:
        return x.sum(-1, keepdim=True, dtype=torch.float64)
    return in_blocks(x).sum(-1).sum(-1, keepdim=True, dtype=torch.float64)


def exp_totals(x: Tensor, peak: Tensor, tau: "float | Tensor", squares: bool = False) -> list[Tensor]:
    """[Σ e], or [Σ e, Σ e²], in float64, `[..., 1]`, for e = exp((x − peak)/τ); `peak` is the largest of its row.

    A few rows at a time, all in one buffer: only x itself comes from further than the cache. Entries whose square would
    not be a normal number count as the smallest of which it is, too little for all of them together to show.
    """
    size, count = x.shape[-1], x.numel() // x.shape[-1]
    flat, peak = x.reshape(-1, size), peak.reshape(-1, 1)
    tau = tau.expand(*x.shape[:-1], 1).reshape(-1, 1) if isinstance(tau, Tensor) else tau
    rows = max(min(IN_CACHE * torch.get_num_threads() // size, count), 1)
    buffer, found = x.new_empty(rows, size), []
    for start in range(0, max(count, 1), rows):
        some = slice(start, start + rows)
        own = tau[some] if isinstance(tau, Tensor) else tau
        found.append(_exp_totals(flat[some], peak[some], own, squares, buffer[: min(rows, count - start)]))
    sums = found[0] if len(found) == 1 else [torch.cat(parts) for parts in zip(*found, strict=True)]
    return [each.view(*x.shape[:-1], 1) for each in sums]


def _exp_totals(x: Tensor, peak: Tensor, tau: "float | Tensor", squares: bool, buffer: Tensor) -> list[Tensor]:
    e = torch.sub(x, peak, out=buffer)
    if isinstance(tau, Tensor) or tau != 1:
        e.div_(tau)
    e.clamp_min_(FLOORS[x.dtype][0] / 2).exp_()
    return [total(e), total(e.square_())] if squares else [total(e)]


def places(mask: Tensor) -> Tensor:
    """Where a mask `[n]` is true, ascending; n is a multiple of 8.

    `nonzero` takes its time over every element: where there are many it looks at eight booleans as one number first.
    """
    if len(mask) < ONE_BY_ONE:
        return mask.nonzero().view(-1)
    eights = mask.view(-1, 8)
    some = eights.view(torch.int64).view(-1).nonzero().view(-1)
    inside = eights.index_select(0, some).view(-1).nonzero().view(-1)
    return torch.add(inside & 7, some.index_select(0, inside >> 3), alpha=8)


def divide(x: Tensor, by: "float | Tensor") -> Tensor:
    """x / by, without the pass over memory when there is nothing to do."""
    return x if isinstance(by, float) and by == 1.0 else x / by


def plus(x: Tensor, factor: float | Tensor, y: float | Tensor) -> Tensor:
    """factor·x + y in one pass and one allocation where the factor is a number."""
    if isinstance(factor, Tensor):
        return torch.mul(x, factor).add_(y)
    return torch.add(y, x, alpha=factor) if isinstance(y, Tensor) else torch.mul(x, factor).add_(y)


def exp_(x: Tensor) -> Tensor:
    """exp(x) in place, zero where the result would not be a normal number.

    Processors take a hundred times as long over subnormal numbers, and a row of peaked scores is full
    of them.
    """
    floor, smallest = FLOORS[x.dtype]
    return torch.threshold_(x.clamp_min_(floor).exp_(), smallest, 0.0)


def normalise_(x: Tensor) -> Tensor:
    """x over its sum, in place: mass 1 within 1e-6 at any vocabulary size."""
    return x.mul_(total(x).reciprocal_().to(x.dtype))


def softmax_(x: Tensor) -> Tensor:
    """exp(x) over its sum, in place; exact zeros where x = −inf."""
    return normalise_(exp_(x.sub_(x.amax(-1, keepdim=True))))


def log_softmax_and_softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Both from one exponential; x itself becomes the first."""
    peak = x.amax(-1, keepdim=True)
    p = exp_(x - peak)
    mass = total(p)
    return x.sub_(peak + mass.log().to(x.dtype)), p.mul_(mass.reciprocal_().to(x.dtype))


def log_total(x: Tensor) -> Tensor:
    """log Σ exp(x) for each row, `[..., 1]`, in the dtype of x."""
    peak = x.amax(-1, keepdim=True)
    return total(exp_(torch.sub(x, peak))).log_().to(x.dtype) + peak


def block_maxima(x: Tensor) -> Tensor:
    """The largest entry of each block, `[..., V/b]`: what tells where the few columns that matter are."""
    return in_blocks(x, fill=-torch.inf).amax(-1)


def argmax(x: Tensor, peaks: Tensor | None = None) -> Tensor:
    """The lowest id among the largest entries, `[..., 1]`: first the best block, then its best entry.

    `torch.argmax` over a whole vocabulary takes ten times as long as `amax`.
    """
    if x.shape[-1] < 4 * BLOCK:
        return x.argmax(-1, keepdim=True)
    blocks = in_blocks(x, fill=-torch.inf)
    block = (blocks.amax(-1) if peaks is None else peaks).argmax(-1, keepdim=True)
    return block * blocks.shape[-1] + pick(blocks, block).argmax(-1, keepdim=True)


def pick(blocks: Tensor, index: Tensor) -> Tensor:
    """One block for each row: `[..., n, b]`, `[..., 1]` -> `[..., b]`."""
    return blocks.gather(-2, index.unsqueeze(-1).expand(*index.shape, blocks.shape[-1])).squeeze(-2)


def one_hot_argmax(x: Tensor) -> Tensor:
    """All mass on the largest entry; the lowest id wins a tie."""
    return torch.zeros_like(x).scatter_(-1, argmax(x), 1.0)


def power(x: Tensor, n: "int | float | Tensor") -> Tensor:
    """x**n for x >= 0. Repeated squaring for whole n: `torch.pow` costs a hundred multiplications, and one call."""
    if isinstance(n, Tensor) or n != int(n) or n > 1024 or x.numel() < FEW:
        return x.pow(n)
    n, result, square = int(n), None, x
    while n:
        if n & 1:
            result = square if result is None else result * square
        n >>= 1
        if n:
            square = square * square
    return torch.ones_like(x) if result is None else result


def tiny(dtype: torch.dtype) -> float:
    """What stands in for zero where the gradient of q·log q is taken: just above what `exp_` cuts off."""
    return 4 * torch.finfo(dtype).tiny


def first_rows(bad: Tensor, limit: int = 5) -> str:
    """The indices of the true entries of `bad` `[...]` in words: "row 3", "rows (0, 1), (2, 0)"."""
    found = bad.nonzero().tolist()
    names = [str(i[0]) if len(i) == 1 else str(tuple(i)) for i in found[:limit]]
    more = f" and {len(found) - limit} more" if len(found) > limit else ""
    if bad.ndim == 0:
        return "the row"
    return f"row {names[0]}" if len(found) == 1 else f"rows {', '.join(names)}{more}"


def in_range(value: Any) -> Any:
    """Whether a number, or each entry of a tensor, is 0 or of a size that float32 can divide by and be divided by."""
    size = abs(value)
    if isinstance(value, Tensor):
        return (size == 0) | ((size >= 1e-30) & (size <= 1e30))
    return size == 0 or 1e-30 <= size <= 1e30


def all_finite(x: Tensor) -> bool:
    """Whether every entry is a finite number, told from one read on the host."""
    if x.numel() == 1:
        return math.isfinite(x.item())
    return (x - x).sum().item() == 0  # 0 for a number, NaN for inf and NaN


def is_number(value: object) -> TypeGuard[float]:
    """A plain number: no bool, no NaN."""
    if type(value) is float or type(value) is int:  # what nearly everyone gives; asking an ABC takes ten times as long
        return value == value
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def is_whole(value: object) -> TypeGuard[int]:
    """A plain number without a fraction, be it written 3 or 3.0."""
    return is_number(value) and (isinstance(value, Integral) or float(value).is_integer())
