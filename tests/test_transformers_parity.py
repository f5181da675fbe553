"""Top-k and top-p keep the tokens that transformers keeps, temperature first, and give them the same probabilities."""

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from simplexity import TopK, TopP, decoder

ROWS = 1000


def rows(size: int, spread: float = 3.0) -> Tensor:
    s = spread * torch.randn(ROWS, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    ordered = s.sort(-1).values
    assert bool((ordered.diff() > 0).all())  # at ties the two differ on purpose: here exactly k are kept
    return s


def warped(s: Tensor, temperature: float, cut: TopKLogitsWarper | TopPLogitsWarper) -> Tensor:
    ids = torch.zeros(len(s), 1, dtype=torch.int64)
    return cut(ids, TemperatureLogitsWarper(temperature)(ids, s.clone()))


def compare(spec: str, s: Tensor, theirs: Tensor) -> None:
    """The decoder's q, by its path on a CPU and by the one that reads nothing, against the warped scores."""
    kept, expected = theirs > -torch.inf, torch.softmax(theirs, -1)
    q = decoder(spec).distribution(s)
    blind, status = decoder(spec).distribution(s, validate=False)
    assert not status.any()
    for found in (q, blind):
        assert torch.equal(found > 0, kept)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [5, 50, 700])
@pytest.mark.parametrize("k", [1, 2, 5, 40, 1000])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_top_k(size, k, temperature):
    s = rows(size)
    theirs = warped(s, temperature, TopKLogitsWarper(k))
    assert torch.equal(TopK(k).mask(s), theirs > -torch.inf)
    compare(f"top-k:k={k},temperature={temperature}", s, theirs)


@pytest.mark.parametrize("size", [5, 50, 700])
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_top_p(size, p, temperature):
    s = rows(size)
    theirs = warped(s, temperature, TopPLogitsWarper(p))
    assert torch.equal(TopP(p, temperature).mask(s), theirs > -torch.inf)
    compare(f"top-p:p={p},temperature={temperature}", s, theirs)


@pytest.mark.parametrize("spread", [0.01, 1.0, 12.0])
@pytest.mark.parametrize("p", [0.3, 0.95, 1 - 1e-7])
def test_top_p_on_flat_and_on_sharp_rows(spread, p):
    # from nuclei of nearly all tokens to nuclei of one, and a p that reaches far into the tail
    s = rows(300, spread)
    theirs = warped(s, 1.0, TopPLogitsWarper(p))
    assert torch.equal(TopP(p).mask(s), theirs > -torch.inf)
    compare(f"top-p:p={p}", s, theirs)


def test_rows_with_their_own_parameters():
    s = rows(60)
    rng = torch.Generator().manual_seed(1)
    k = torch.randint(1, 80, (ROWS,), generator=rng)
    p = 0.02 + 0.97 * torch.rand(ROWS, generator=rng, dtype=torch.float64)
    temperature = 0.3 + 2 * torch.rand(ROWS, generator=rng, dtype=torch.float64)

    def each(cut) -> Tensor:
        return torch.cat([warped(s[i : i + 1], temperature[i].item(), cut(i)) for i in range(ROWS)]) > -torch.inf

    assert torch.equal(TopK(k).mask(s), each(lambda i: TopKLogitsWarper(k[i].item())))
    assert torch.equal(TopP(p, temperature).mask(s), each(lambda i: TopPLogitsWarper(p[i].item())))


def test_top_k_then_top_p():
    s = rows(100)
    ids = torch.zeros(ROWS, 1, dtype=torch.int64)
    theirs = TopPLogitsWarper(0.8)(ids, TopKLogitsWarper(20)(ids, s.clone()))
    assert torch.equal(TopK(20).then(TopP(0.8)).mask(s), theirs > -torch.inf)


def test_forbidden_tokens_stay_forbidden():
    s = rows(40)
    s = s.masked_fill(torch.rand(s.shape, generator=torch.Generator().manual_seed(2)) < 0.3, -torch.inf)
    compare("top-k:k=5", s, warped(s, 1.0, TopKLogitsWarper(5)))
    compare("top-p:p=0.9", s, warped(s, 1.0, TopPLogitsWarper(0.9)))
