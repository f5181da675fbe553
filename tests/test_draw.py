"""Draws: the right frequencies, reproducible, and a row's own business."""

import pytest
import torch
from scipy.stats import chisquare

from simplexity import Codes, Context, decoder, draw, mode
from simplexity.draw import inverse_cdf, uniform


@pytest.mark.parametrize("size", [3, 600, 1_000])  # within one block, several blocks, blocks with padding
@pytest.mark.parametrize("seeded", [True, False])
def test_frequencies(size, seeded):
    n = 200_000
    q = torch.softmax(torch.randn(size, generator=torch.Generator().manual_seed(4)), -1)
    rows = q.expand(n, size) if size == 3 else None
    if rows is not None:
        tokens = draw(rows, seeds=torch.arange(n)) if seeded else draw(rows, torch.Generator().manual_seed(5))
    else:
        u = uniform(torch.arange(n)) if seeded else torch.rand(n, generator=torch.Generator().manual_seed(5)).double()
        tokens = torch.cat([inverse_cdf(q.expand(len(part), size), part) for part in u.split(20_000)])
    counts = torch.bincount(tokens, minlength=size).double()
    expected = q.double() / q.double().sum() * n
    assert chisquare(counts, expected).pvalue > 1e-3


def test_zero_probabilities_are_never_drawn_even_at_the_ends():
    q = torch.zeros(4, 2_000)
    q[0, 5], q[1, 0], q[2, 1999], q[3, 128] = 1e-30, 1.0, 0.3, 1.0
    last = torch.tensor([0.0, 0.5, 1 - 2**-53])
    for u in last:
        assert inverse_cdf(q, u.expand(4).double()).tolist() == [5, 0, 1999, 128]


@pytest.mark.parametrize("size", [2, 100, 511, 600, 2_048, 49_152, 10_007])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_alone_gives_the_token_it_gives_among_others(size, dtype):
    q = torch.softmax(2 * torch.randn(40, size, dtype=dtype), -1)
    q[q < 0.2 * q.mean()] = 0.0
    u = torch.cat([uniform(torch.arange(38)), torch.tensor([0.0, 1 - 2**-53]).double()])
    assert inverse_cdf(q, u).tolist() == [int(inverse_cdf(q[i], u[i])) for i in range(40)]


def test_a_generator_reproduces():
    scores = torch.randn(5, 300)
    one, two = (decoder("softmax").sample(scores, torch.Generator().manual_seed(3)) for _ in range(2))
    assert (one == two).all()
    assert decoder("softmax").sample(scores[0]).shape == ()


@pytest.mark.parametrize("vary", ["seed", "step", "stream"])
def test_uniforms_are_uniform_along_each_coordinate(vary):
    n = torch.arange(100_000)
    zero = torch.zeros_like(n)
    if vary == "stream":
        u = torch.stack([uniform(torch.tensor(9), 4, stream) for stream in range(20_000)])
    else:
        u = uniform(n, 3) if vary == "seed" else uniform(zero, n)
    counts = torch.histc(u, 64, 0, 1)
    assert chisquare(counts).pvalue > 1e-3
    pairs = torch.histogramdd(torch.stack([u[:-1], u[1:]], -1), [8, 8], range=[0.0, 1.0, 0.0, 1.0]).hist
    assert chisquare(pairs.flatten(), torch.full((64,), pairs.sum() / 64)).pvalue > 1e-3
    assert (u >= 0).all()
    assert (u < 1).all()


@pytest.mark.parametrize(("step", "stream"), [(0, 0), (7, 3), (2**40 + 1, 9), (-5, 0)])
def test_few_seeds_give_the_numbers_they_give_among_many(step, stream):
    seeds = torch.randint(-(2**62), 2**62, (100,), generator=torch.Generator().manual_seed(1))
    seeds[:3] = torch.tensor([0, -1, 2**63 - 1])
    together = uniform(seeds, step, stream)
    assert torch.equal(together, torch.cat([uniform(part, step, stream) for part in seeds.split(9)]))
    assert uniform(seeds[5], step, stream) == together[5]
    assert torch.equal(uniform(seeds[:6].view(2, 3).t(), step, stream), together[:6].view(2, 3).t())
    assert torch.equal(uniform(seeds[:2].expand(3, 2), step, stream), together[:2].expand(3, 2))


def test_the_default_device_does_not_matter():
    x, seeds = torch.randn(1, 5000, generator=torch.Generator().manual_seed(1)), torch.tensor([3])
    specs = ["softmax", "top-p:p=0.9", "top-p:p=0.9,temperature=9", "bok", "bok:temperature=20", "bok:solver=exact"]
    expected = [decoder(spec).sample(x, seeds=seeds) for spec in specs]
    with torch.device("meta"):
        found = [decoder(spec).sample(x, seeds=seeds) for spec in specs]
    assert [token.item() for token in found] == [token.item() for token in expected]


def test_uniforms_are_fixed_for_good():
    # SplitMix64 in plain Python; a change of these numbers changes every seeded text anyone has kept
    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    def expected(seed, step, stream=0):
        golden = 0x9E3779B97F4A7C15
        bits = mix((seed + golden) % 2**64)
        bits = mix((bits + step * golden) % 2**64)
        return (mix((bits + stream * golden) % 2**64) >> 11) / 2**53

    pairs = [(0, 0), (1, 7), (-1, 2**40), (2**63 - 1, -(2**62)), (-(2**63), 3)]
    seeds, steps = torch.tensor(pairs).T
    assert uniform(seeds, steps).tolist() == [expected(*pair) for pair in pairs]
    assert [uniform(torch.tensor(a), b).item() for a, b in pairs] == [expected(*pair) for pair in pairs]
    assert uniform(torch.tensor(5), 6, stream=7).item() == expected(5, 6, 7)


def test_no_rows_need_no_seeds():
    for seeds in ([], (), torch.zeros(0, dtype=torch.int64)):
        assert decoder("softmax").sample(torch.zeros(0, 4), seeds=seeds).shape == (0,)


def test_mode_takes_the_lowest_id():
    assert mode(torch.tensor([[0.2, 0.4, 0.4], [0.5, 0.0, 0.5]])).tolist() == [1, 0]
    wide = torch.zeros(1, 3_000)
    wide[0, [777, 1500, 2999]] = 0.25
    assert mode(wide).tolist() == [777]


@pytest.mark.parametrize(
    "spec", ["softmax", "top-k", "top-p", "sparsemax", "entmax", "kl", "bok", "bok:solver=exact", "bok:steps=1,lam=0.5"]
)
def test_a_decoder_draws_from_its_distribution_token_for_token(spec):
    # drawing works on the few columns that matter, `distribution` writes q out: they must not drift apart
    scores = 3 * torch.randn(400, 5_000, generator=torch.Generator().manual_seed(8))
    seeds = torch.arange(400)
    d = decoder(spec)
    assert (d.sample(scores, seeds=seeds, step=2) == draw(d.distribution(scores), seeds=seeds, step=2)).all()


@pytest.mark.parametrize(
    "spec", ["softmax:temperature=0.7", "top-p:p=0.8", "sparsemax", "bok", "bok:solver=exact", "xtc"]
)
def test_log_q_of_the_tokens_drawn(spec):
    chosen, seeds = decoder(spec), torch.arange(4)
    x = 3 * torch.randn(4, 2_000, generator=torch.Generator().manual_seed(2))
    context = Context(seeds=seeds)
    tokens, log_q = chosen.sample(x, context=context, log_q=True)
    assert torch.equal(tokens, chosen.sample(x, context=context))
    q = chosen.distribution(x, context)
    torch.testing.assert_close(log_q, q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).log())
    x[1, 3] = torch.nan
    tokens, log_q, status = chosen.sample(x, context=context, log_q=True, validate=False)
    assert status.tolist() == [0, 1, 0, 0]
    assert tokens[1] == -1
    assert log_q[1] == -torch.inf
    assert log_q[[0, 2, 3]].isfinite().all()
    assert len(chosen.sample(x, context=context, validate=False)) == 2
    with pytest.raises(ValueError, match="row 1"):
        chosen.sample(x, context=context, log_q=True)


def test_log_q_of_coupled_draws():
    x = torch.randn(1, 500, generator=torch.Generator().manual_seed(2)).expand(8, -1)
    tokens, log_q = decoder("softmax").sample(x, codes=Codes.spread(3, 8), log_q=True)
    assert torch.equal(tokens, decoder("softmax").sample(x, codes=Codes.spread(3, 8)))
    torch.testing.assert_close(log_q, torch.log_softmax(x, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1))
