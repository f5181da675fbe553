"""From a distribution to tokens: its mode, or independent draws by inverse CDF.

A draw needs one uniform number per row, not one per token: walk the cumulative sums of blocks, then of
the one block that holds the number.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from simplexity.rows import BLOCK, argmax, covers, first_rows, in_blocks, pick

Seeds = int | Sequence[int] | Tensor
Pick = Callable[[Tensor], Tensor]
"""From masses `[..., n]`, which need not sum to 1, to one place in each row, int64 `[...]`."""

GRAIN = 2.0**-53  # of a number in [0, 1)
LAST = 1 - 2**-52  # u·Σq must not round up to Σq, which no cumulative sum exceeds
FEW = 16  # seeds that are mixed one by one
ALL = 2**64 - 1  # bits
GOLDEN = -0x61C8864680B583EB  # 2^64 divided by the golden ratio, as a signed number


def mode(q: Tensor) -> Tensor:
    """The most probable token of each row, `[..., V] -> [...]`; the lowest id wins a tie."""
    return argmax(q).squeeze(-1)


def draw(
    q: Tensor,
    generator: torch.Generator | None = None,
    seeds: Seeds | None = None,
    step: int | Tensor = 0,
    validate: bool = True,
) -> Tensor:
    """One token per row, int64 `[...]`, with probability q `[..., V]`.

    With `seeds` `[...]` the draw of a row depends on its seed, the step and its q alone, not on its
    place in the batch or its neighbours; otherwise on `generator`, or torch's global one.
    `validate=False` skips the check that every row has mass.

    >>> draw(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), seeds=[7, 8])
    tensor([1, 0])
    """
    q = q if q.dtype in (torch.float32, torch.float64) else q.float()
    if validate and bool((bad := ~((q.sum(-1) > 0) & (q.amin(-1) >= 0) & (q.amax(-1) < torch.inf))).any()):
        raise ValueError(f"{first_rows(bad)} of q has no mass to draw from, or negative or infinite entries")
    return inverse_cdf(q, uniforms(q.shape[:-1], q.device, generator, seeds, step))


def uniforms(
    rows: torch.Size,
    device: torch.device,
    generator: torch.Generator | None = None,
    seeds: Seeds | None = None,
    step: int | Tensor = 0,
) -> Tensor:
    """One number in [0, 1) for each row, float64 `[...]`: from the seeds and the step, or from the generator."""
    check_draw(rows, generator, seeds, step)
    if seeds is None:
        return torch.rand(rows, generator=generator, dtype=torch.float64, device=device)
    return uniform(as_seeds(seeds, rows, device), step if isinstance(step, Tensor) else int(step))


def check_draw(rows: torch.Size, generator: torch.Generator | None, seeds: Seeds | None, step: int | Tensor) -> None:
    """Raise a ValueError where a generator and seeds are both given, or the step is none."""
    if generator is not None and seeds is not None:
        raise ValueError("give a generator or seeds, not both")
    if isinstance(step, Tensor) and (step.is_floating_point() or not covers(step.shape, rows)):
        raise ValueError(f"step must be whole numbers, one or {list(rows)}, got {step.dtype} {list(step.shape)}")
    if not isinstance(step, (Integral, Tensor)):
        raise ValueError(f"step must be a whole number, got {step!r}")


def inverse_cdf(q: Tensor, u: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds u·Σq, for u in [0, 1), `[...]`.

    A token with q = 0 is never returned: the cumulative sum does not grow there.
    """
    if q.shape[-1] == 1:
        return torch.zeros_like(u, dtype=torch.int64)
    if u.numel() == 1 and q.device.type == "cpu":
        return torch.full(u.shape, _place_in_row(q.reshape(-1), float(u)), device=u.device)
    u = u.unsqueeze(-1).clamp_max(LAST)
    if q.shape[-1] < 4 * BLOCK:
        ends = q.cumsum(-1, dtype=torch.float64)
        return _first_above(ends, u * ends[..., -1:]).squeeze(-1)
    blocks = in_blocks(q)
    sums = blocks.sum(-1)
    ends = sums.cumsum(-1, dtype=torch.float64)
    target = u * ends[..., -1:]
    block = _first_above(ends, target)
    inside = pick(blocks, block).cumsum(-1, dtype=torch.float64)
    # the block was summed in another precision: what is left of the target may lie a rounding beyond its end
    left = torch.minimum(target - (ends - sums).gather(-1, block), inside[..., -1:] * LAST)
    return _first_above(inside, left).add_(block, alpha=blocks.shape[-1]).squeeze(-1)


def _place_in_row(q: Tensor, u: float) -> int:
    """The same for one row `[V]`, number for number, with what is small in plain Python: half the time."""
    if len(q) < 4 * BLOCK:
        ends = list(accumulate(q.tolist()))
        return min(bisect_right(ends, min(u, LAST) * ends[-1]), len(ends) - 1)
    return LongRow(q).place(u)


class LongRow:
    """The inverse CDF of one row `[V]`, for as many numbers as one likes; `mass` is its sum."""

    def __init__(self, q: Tensor) -> None:
        self.blocks = in_blocks(q)
        self.sums = self.blocks.sum(-1)
        self.ends = self.sums.cumsum(-1, dtype=torch.float64).tolist()
        self.mass = self.ends[-1]

    def place(self, u: float) -> int:
        """The first token whose cumulative mass exceeds u·Σq."""
        target = min(u, LAST) * self.mass
        block = min(bisect_right(self.ends, target), len(self.ends) - 1)
        inside = list(accumulate(self.blocks[block].tolist()))
        left = min(target - (self.ends[block] - float(self.sums[block])), inside[-1] * LAST)
        return min(bisect_right(inside, left), len(inside) - 1) + block * self.blocks.shape[-1]


@dataclass(frozen=True, eq=False)
class ByNumber:
    """Picks by one number in [0, 1) for each row: see `inverse_cdf`.

    Numbers that are not `seeded` may be used in any way that draws from q: nobody has them to draw again elsewhere.
    """

    u: Tensor
    seeded: bool = True

    def __call__(self, masses: Tensor) -> Tensor:
        """The places."""
        return inverse_cdf(masses, self.u)


def locate(q: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(token, where in its interval u lies, from 0 to 1, how wide that is), each `[...]`, for u in [0, 1).

    As `inverse_cdf`, up to the rounding of sums: here u decides about the tokens after this one too, so that every
    token's interval is mapped onto all of [0, 1).
    """
    blocks = in_blocks(q) if q.shape[-1] >= 4 * BLOCK else q.unsqueeze(-2)
    block, left, share = _descend(blocks.sum(-1).double(), u.unsqueeze(-1))
    token, rest, part = _descend(pick(blocks, block).double(), left)
    token = token.add_(block, alpha=blocks.shape[-1])
    return token.squeeze(-1), rest.squeeze(-1), (share * part).squeeze(-1)


def _descend(masses: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the first of the masses `[..., n]` whose end exceeds u·Σ, where in it u lies, its share), each `[..., 1]`."""
    ends = masses.cumsum(-1)
    target = u * ends[..., -1:]
    place = _first_above(ends, target)
    mass = masses.gather(-1, place)
    rest = (target - (ends.gather(-1, place) - mass)) / mass
    return place, rest.clamp_(0.0, 1.0 - GRAIN), mass / ends[..., -1:]


def _first_above(ends: Tensor, target: Tensor) -> Tensor:
    """The first index whose cumulative sum exceeds target, `[..., 1]`; the last one in a row without mass."""
    return torch.searchsorted(ends, target, right=True).clamp_max_(ends.shape[-1] - 1)


def as_seeds(seeds: Seeds, rows: torch.Size, device: torch.device) -> Tensor:
    """Seeds as int64 `[...]`; a ValueError unless there is one for each row."""
    if not isinstance(seeds, Tensor):
        plain: list[Any] = [seeds] if isinstance(seeds, (int, Integral)) else list(seeds)
        if all(isinstance(seed, Integral) for seed in plain):  # hashes are often unsigned: the same 64 bits
            plain = [(int(seed) + 2**63) % 2**64 - 2**63 for seed in plain]
            seeds = torch.tensor(plain[0] if isinstance(seeds, Integral) else plain, dtype=torch.int64)
    table = torch.as_tensor(seeds, device=device)
    if table.is_floating_point() or table.dtype == torch.bool:
        raise ValueError(f"seeds must be whole numbers, got {table.dtype}")
    if table.shape != rows:
        raise ValueError(f"seeds must have one entry per row, shape {list(rows)}, got {list(table.shape)}")
    return table.to(torch.int64)


def derive_seeds(seeds: Tensor, n: int) -> Tensor:
    """n further seeds for each one, int64 `[rows] -> [rows·n]`, those of a row side by side."""
    return derived_seed(seeds.unsqueeze(-1), torch.arange(n, device=seeds.device)).flatten()


def derived_seed(seeds: Tensor, index: Tensor) -> Tensor:
    """One of the seeds that `derive_seeds` gives, int64 `[...]`."""
    return _mix(_mix(seeds + GOLDEN) + index * GOLDEN)


def uniform(seeds: Tensor, step: int | Tensor = 0, stream: int = 0) -> Tensor:
    """A number in [0, 1) with 53 random bits for each (seed, step, stream), float64 `[...]`.

    Counter-based: SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014) over the seed, the step and
    the stream in turn. Int64 arithmetic wraps around on every device, so every device gives the same bits.

    >>> uniform(torch.tensor([1, 1, 2]), step=torch.tensor([0, 1, 0]))
    tensor([...], dtype=torch.float64)
    """
    if seeds.numel() <= FEW and seeds.device.type == "cpu" and not isinstance(step, Tensor):
        bits = [
            _mixed(_mixed(_mixed(seed + GOLDEN) + step * GOLDEN) + stream * GOLDEN)
            for seed in seeds.reshape(-1).tolist()
        ]
        return torch.tensor([(x >> 11) * GRAIN for x in bits], dtype=torch.float64, device=seeds.device).view(
            seeds.shape
        )
    bits = _mix(_mix(_mix(seeds + GOLDEN) + _times_golden(step)) + _times_golden(stream))
    return _shift(bits, 11).double() * GRAIN


def _times_golden(n: int | Tensor) -> int | Tensor:
    if isinstance(n, Tensor):
        return n.to(torch.int64) * GOLDEN
    return (n * GOLDEN + 2**63) % 2**64 - 2**63  # Python's numbers do not wrap around by themselves


def _shift(x: Tensor, n: int) -> Tensor:
    """A logical right shift: the sign bit is not copied."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _mixed(x: int) -> int:
    """`_mix` of one number, as 64 bits without a sign: a tensor of few takes as long as one of many."""
    x &= ALL
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47 & ALL
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15 & ALL
    return x ^ (x >> 31)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift(x, 31)
