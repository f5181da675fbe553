"""The nucleus of rows that keep thousands of tokens: the set of a float64 sort, without one."""

import pytest
import torch

from simplexity import Context, decoder
from simplexity.nucleus import between, cuts_around

SIZES = [(1, 49_152), (3, 9_001), (2, 20_480), (4, 3_000)]  # with and without a short divisor, and rows that are sorted


def rows(shape: str, batch: int, size: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(batch + size)
    x = torch.randn(batch, size, generator=g)
    if shape == "tied":
        return (2 * x).round() / 2
    if shape == "constant":
        return torch.full((batch, size), 2.5)
    if shape == "masked":
        x[:, torch.randperm(size, generator=g)[: size // 2]] = -torch.inf
    if shape == "periodic":  # a strided sample sees but a part of it
        x += 3.0 * (torch.arange(size) % 64 == 0)
    if shape == "peaked":
        x = 3 * x - 20
        x[:, 7:60] = 15 * torch.rand(batch, 53, generator=g)
    if shape == "two heights":
        x = torch.where(torch.rand(batch, size, generator=g) < 0.3, 1.0, 0.0)
    return x


def reference(x: torch.Tensor, p: float, tau: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(kept, the mass before each token) of softmax(x/τ) in float64, lowest ids first among equals."""
    order = x.argsort(dim=-1, descending=True, stable=True)
    q = torch.softmax(x.double() / tau, -1)
    ranked = q.gather(-1, order)
    before = torch.empty_like(q).scatter_(-1, order, ranked.cumsum(-1) - ranked)
    return (before < p) & (x > -torch.inf), before


SHAPES = ["flat", "tied", "constant", "masked", "periodic", "peaked", "two heights"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.9999])
@pytest.mark.parametrize(("batch", "size"), SIZES)
def test_the_set_of_a_float64_sort(shape, p, batch, size):
    x = rows(shape, batch, size)
    for dtype in (torch.float32, torch.float64):
        q = decoder(f"top-p:p={p},temperature=0.8").distribution(x.to(dtype))
        kept, before = reference(x, p, 0.8)
        differs = (q > 0) != kept
        assert (before[differs] - p).abs().lt(1e-6).all()
        expected = torch.softmax((x.double() / 0.8).masked_fill(~(q > 0), -torch.inf), -1)
        assert 0.5 * (q.double() - expected).abs().sum(-1).max() < 2e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_draws_of_a_row_alone_and_among_others(shape):
    x = torch.cat([rows(shape, 3, 20_480), rows("peaked", 1, 20_480), rows("flat", 1, 20_480)])
    chosen, seeds = decoder("top-p:p=0.9,temperature=0.8"), torch.arange(5)
    kept, before = reference(x, 0.9, 0.8)
    for step in range(20):
        tokens = chosen.sample(x, seeds=seeds, step=step)
        assert bool((kept | ((before - 0.9).abs() < 1e-6)).gather(-1, tokens.unsqueeze(-1)).all())
        assert tokens.tolist() == [int(chosen.sample(x[i], seeds=i, step=step)) for i in range(5)]


def test_a_p_for_each_row_and_all_of_it():
    x = rows("flat", 3, 20_480)
    x[1, :10_000] = -torch.inf
    x[1, -1] = -90.0  # softmax at the nucleus' temperature has no number for it, at a higher one it has
    knobs = {"p": [0.7, 1.0, 0.9], "temperature": [3.0, 9.0, 0.5], "temperature_last": True}
    mixed = decoder({"decoder": "top-p", **knobs})
    q = mixed.distribution(x)
    assert (q[1] > 0).equal(x[1] > -torch.inf)
    for i, (p, t) in enumerate([(0.7, 3.0), (1.0, 9.0), (0.9, 0.5)]):
        alone = decoder(f"top-p:p={p},temperature={t},temperature_last=true")
        torch.testing.assert_close(q[i], alone.distribution(x[i]), atol=1e-9, rtol=1e-5)
        assert mixed.sample(x, seeds=[3, 4, 5])[i] == alone.sample(x[i], seeds=3 + i)


def test_a_mask_over_a_flat_row():
    x, mask = rows("flat", 1, 20_480), torch.zeros(1, 20_480, dtype=torch.bool)
    mask[:, ::3] = True
    q = decoder("top-p").distribution(x, Context(mask=mask))
    kept, before = reference(x.masked_fill(~mask, -torch.inf), 0.9, 1.0)
    assert (before[(q > 0) != kept] - 0.9).abs().lt(1e-6).all()


@pytest.mark.parametrize("seed", range(5))
def test_cuts_leave_few_tokens_between(seed):
    e = torch.randn(49_152, generator=torch.Generator().manual_seed(seed)).mul(1.25).exp()
    mass = float(e.double().sum())
    high, low = cuts_around(e, 0.9 * mass, mass)
    ids = between(e, low.level, high.level)
    assert high.held < 0.9 * mass <= low.held
    assert 0 < len(ids) < 500
    assert torch.equal(ids, ((e > low.level) & (e <= torch.tensor(high.level))).nonzero().view(-1))
