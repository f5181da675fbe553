"""Fused draws on the CPU: the token of the general path, for the same number, on every kind of row."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import simplexity as sx
from goodness import chi_square
from simplexity import Context, decoder
from simplexity.draw import ByNumber, inverse_cdf, uniform
from simplexity.kernels import cpu_nucleus, draw_fused
from simplexity.kernels.cpu_coverage import draw_coverage
from simplexity.nucleus import prefix
from simplexity.rows import block_maxima

SPECS = [
    "softmax:temperature=0.7",
    "top-k:k=40,temperature=0.7",
    "top-k:k=1",
    "top-p:p=0.9,temperature=0.8",
    "top-p:p=0.3",
    "top-p:p=0.999,temperature=1.5",
    "top-p:p=0.9,temperature=0.8,temperature_last=true",
    "kl:lam=0.7,temperature=0.9",
    "bok",
    "bok:beta=0",
    "bok:temperature=0.8,weights=top-m",
    "bok:weights=uniform,beta=2,k=64",
    "bok:beta=10,k=64,steps=9",
    "bok:steps=1,step=0.1",
    "bok:solver=exact",
    "bok:solver=exact,beta=5,temperature=2",
    "bok:solver=exact,weights=uniform,k=2,lam=1",
    "bok:solver=exact,weights=top-m,m=3,beta=3",
]

DECLINED = {"bok:beta=0", "bok:beta=10,k=64,steps=9", "bok:solver=exact,weights=top-m,m=3,beta=3"}
DECLINED |= {"bok:solver=exact,beta=5,temperature=2", "bok:weights=uniform,beta=2,k=64"}


def rows(shape: str, batch: int, size: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(size + batch)
    x = torch.randn(batch, size, generator=g)
    if shape == "flat":
        return x
    if shape == "tied":
        return x.round()
    x = 3 * x - 20
    head = torch.randint(0, size, (batch, 60), generator=g)
    x = x.scatter(-1, head, 15 * torch.rand(batch, 60, generator=g))
    if shape == "masked":
        x[:, torch.randperm(size, generator=g)[: size // 2]] = -torch.inf
        x[0, 1:] = -torch.inf
        x[0, 0] = 1.0
    return x


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", ["peaked", "flat", "tied", "masked"])
@pytest.mark.parametrize(("batch", "size"), [(1, 8192), (5, 3001), (3, 2048)])
def test_the_token_of_the_general_path(spec, shape, batch, size):
    x = rows(shape, batch, size)
    chosen = decoder(spec)
    q = chosen.distribution(x.double())
    ends = q.cumsum(-1)
    seeds = torch.arange(batch)
    posed = chosen._posed(x, None, True)
    served = 0
    for step in range(12):
        u = uniform(seeds, step)
        tokens = chosen.sample(x, seeds=seeds, step=step)
        served += draw_fused(posed.problem, posed.solver, posed.peaks, ByNumber(u)) is not None
        # the number must lie in the token's own interval of the float64 distribution, up to float32's rounding
        high = ends.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        low = high - q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        slack = 3e-6
        assert bool(((u >= low - slack) & (u <= high + slack)).all()), (u, low, high)
        assert bool((q.gather(-1, tokens.unsqueeze(-1)) > 0).all())
    if shape == "peaked" and spec not in DECLINED:
        assert served == 12, "the table knows this problem"


@pytest.mark.parametrize("spec", SPECS)
def test_leading_dimensions_strides_and_masks(spec):
    x = rows("peaked", 6, 3000)
    chosen = decoder(spec)
    seeds = torch.arange(6)
    expected = chosen.sample(x, seeds=seeds)
    assert torch.equal(chosen.sample(x.view(2, 3, 3000), seeds=seeds.view(2, 3)), expected.view(2, 3))
    padded = torch.cat([x, torch.zeros(6, 8)], -1)[:, :3000]
    assert torch.equal(chosen.sample(padded, seeds=seeds), expected)
    assert torch.equal(chosen.sample(x[4], seeds=4), expected[4])
    mask = torch.zeros(6, 3000, dtype=torch.bool)
    mask[:, 17] = True
    assert chosen.sample(x, seeds=seeds, context=Context(mask=mask)).tolist() == [17] * 6
    assert chosen.sample(x[:0]).shape == (0,)


def test_draws_follow_the_distribution():
    x = rows("peaked", 1, 2048)
    for spec in ("softmax", "top-p", "bok", "bok:solver=exact,beta=2"):
        chosen = decoder(spec)
        q = chosen.distribution(x.double())[0]
        tokens = chosen.sample(x.expand(20_000, -1), seeds=torch.arange(20_000))
        counts = torch.bincount(tokens, minlength=2048).double()
        kept = q * 20_000 >= 5
        expected = torch.cat([q[kept], q[~kept].sum().view(1)]) * 20_000
        seen = torch.cat([counts[kept], counts[~kept].sum().view(1)])
        enough = expected >= 5
        chi = ((seen - expected).square() / expected)[enough].sum()
        freedom = max(int(enough.sum()) - 1, 1)
        assert chi < freedom + 5 * (2 * freedom) ** 0.5 + 5, (spec, chi, freedom)


def test_bad_rows_are_refused_before_a_kernel_sees_them():
    x = rows("peaked", 3, 2048)
    x[1, 5] = torch.nan
    for spec in SPECS:
        with pytest.raises(ValueError, match="row 1"):
            decoder(spec).sample(x)


def test_parameters_per_row_take_the_general_path():
    x = rows("peaked", 2, 2048)
    mixed = decoder({"decoder": "top-p", "p": [0.5, 0.9], "temperature": [0.7, 1.0]})
    seeds = torch.tensor([3, 4])
    tokens = mixed.sample(x, seeds=seeds)
    for i, (p, t) in enumerate([(0.5, 0.7), (0.9, 1.0)]):
        alone = decoder(f"top-p:p={p},temperature={t}")
        assert tokens[i] == alone.sample(x[i], seeds=int(seeds[i]))


def test_the_inverse_cdf_is_what_the_kernels_share():
    e = torch.tensor([[0.0, 2.0, 0.0, 6.0, 0.0]])
    assert inverse_cdf(e, torch.tensor([0.2499])).tolist() == [1]
    assert inverse_cdf(e, torch.tensor([1 - 2**-53], dtype=torch.float64)).tolist() == [3]
    assert sx.decoder("softmax").sample(e.log()).item() in (1, 3)


@pytest.mark.parametrize(
    "spec", ["top-p:temperature=1e-8", "bok:temperature=1e-8", "bok:temperature=1e-8,solver=exact"]
)
def test_the_best_token_survives_a_cut_that_rounds_to_it(spec):
    x = rows("peaked", 3, 2048)
    x[0] += 3e7
    x[0, 100] = x[0].max() + 8
    for some in (x, x[1:2]):
        assert decoder(spec).sample(some, seeds=torch.arange(len(some))).tolist() == some.argmax(-1).tolist()


def test_a_factor_of_the_regulariser_counts():
    @dataclass(frozen=True)
    class Own(sx.Decoder):
        factor: float = 1.0

        def problem(self, scores, context=None):
            return sx.Problem(scores, self.factor * sx.NegEntropy())

    x = rows("peaked", 1, 2048)
    many = x.expand(400, -1)
    hot = Own(factor=4.0).sample(many, seeds=torch.arange(400))
    assert torch.equal(hot, decoder("softmax:temperature=4").sample(many, seeds=torch.arange(400)))


def test_a_common_offset_costs_no_digits():
    x = rows("peaked", 2, 2048)
    for spec in ("kl:lam=100,temperature=0.1", "bok:temperature=0.1"):
        shifted = (x * 64).round() / 64 + 4096  # exact in float32
        q = decoder(spec).distribution(shifted)
        torch.testing.assert_close(q.double(), decoder(spec).distribution(shifted.double()), atol=2e-6, rtol=0)


def test_whole_numbers_of_numpy_are_seeds():
    x = rows("peaked", 1, 2048)
    plain = decoder("softmax").sample(x, seeds=[5], step=3)
    assert decoder("softmax").sample(x, seeds=[np.int64(5)], step=np.int64(3)) == plain


@pytest.mark.parametrize("scale", [0.5, 3.0, 30.0])
@pytest.mark.parametrize(
    "spec",
    [
        "softmax", "top-p:p=0.8", "sparsemax", "bok", "bok:k=16,beta=3,lam=0.3", "bok:weights=top-m,m=4",
        "bok:solver=exact", "bok:weights=uniform,beta=0.2", "bok:weights=rank",
    ],
)  # fmt: skip
def test_log_q_is_that_of_the_reference(spec, scale):
    x = scale * torch.randn(4, 5000)
    x[1, ::3] = -torch.inf
    log_q, status = decoder(spec).log_distribution(x)
    q = decoder(spec).distribution(x.double())
    assert not status.any()
    assert 0.5 * (log_q.double().exp() - q).abs().sum(-1).max() < 1e-5
    likely = q > 1e-30
    torch.testing.assert_close(log_q[likely].double(), q[likely].log(), atol=2e-3, rtol=1e-5)
    assert (log_q[q == 0] < -60).all()


def test_log_q_in_place_leaves_a_row_that_cannot_be_solved():
    x = torch.randn(3, 5000)
    x[1, 7] = torch.nan
    before = x.clone()
    made, status = decoder("bok").log_distribution(x, out=x)
    assert made is x
    assert status.tolist() == [0, 1, 0]
    torch.testing.assert_close(x[1], before[1], equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(x[[0, 2]].exp(), decoder("bok").distribution(before[[0, 2]]), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "spec", ["bok", "bok:weights=uniform,beta=0.05", "bok:weights=top-m,m=2", "bok:temperature=0.8"]
)
def test_log_q_where_few_tokens_weigh_and_all_others_lie_just_below(spec):
    x = torch.full((3, 49_152), -9.5)
    x[0, 7], x[0, 99], x[1, 3], x[2, :40] = 0.0, -0.3, 1.0, torch.linspace(-2, 0, 40)
    log_q, _ = decoder(spec).log_distribution(x)
    torch.testing.assert_close(log_q.double(), decoder(spec).distribution(x.double()).log(), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "spec", ["bok", "bok:weights=top-m,m=3", "bok:weights=uniform,beta=0.05", "top-p", "top-p:p=0.99"]
)
def test_log_q_over_scores_of_rows_that_keep_one_token_or_a_thousand(spec):
    scale = torch.tensor([[2.0], [2.5], [3.0], [4.0], [8.0], [60.0]])
    x = torch.empty(6, 9_100)[:, :9_000].copy_(scale * torch.randn(6, 9_000))
    x[1].mul_(2).round_().div_(2)  # ties, at the edge of a nucleus too
    q = decoder(spec).distribution(x.double())
    made, status = decoder(spec).log_distribution(x, out=x)
    assert made is x
    assert not status.any()
    weighs = q > 1e-6
    torch.testing.assert_close(x[weighs].double(), q[weighs].log(), atol=1e-6, rtol=1e-6)
    assert x.exp().sum(-1).sub(1).abs().max() < 1e-5
    if spec.startswith("top-p"):
        assert ((x > -torch.inf) == (q > 0)).all()
        assert (q > 0).sum(-1).amax() > 100 * (q > 0).sum(-1).amin()


FLAT = [
    "bok:temperature=0.8",
    "bok:temperature=0.8,weights=top-m",
    "bok:weights=top-m,m=3,k=32,beta=0.05",
    "bok:k=64,beta=0.02,lam=0.5,steps=9,step=0.3",
    "bok:weights=uniform,beta=0.02",
    "bok:temperature=0.5,steps=1",
]


def flat_rows(size: int) -> torch.Tensor:
    """Two heights of the best token, ties of the best eight, half of the tokens forbidden, no token above another."""
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(size))
    x[1, 17] = 7.0
    x[2, 5:25] = 4.5
    x[3, torch.randperm(size, generator=torch.Generator().manual_seed(1))[: size // 2]] = -torch.inf
    x[4] = 0.25
    return x


@pytest.mark.parametrize("spec", FLAT)
@pytest.mark.parametrize("size", [49_152, 9_001])
def test_steps_on_flat_rows_are_those_of_the_reference(spec, size):
    x, chosen, seeds = flat_rows(size), decoder(spec), torch.arange(5)
    q = chosen.distribution(x.double())
    ends = q.cumsum(-1)
    for i in range(5):  # alone, where a few tokens that feel coverage are lists
        log_q, _ = chosen.log_distribution(x[i])
        assert 0.5 * (log_q.double().exp() - q[i]).abs().sum() < 3e-6
    log_q, _ = chosen.log_distribution(x)
    assert 0.5 * (log_q.double().exp() - q).abs().sum(-1).max() < 3e-6
    for step in range(6):
        tokens, u = chosen.sample(x, seeds=seeds, step=step), uniform(seeds, step)
        alone = torch.stack([chosen.sample(x[i], seeds=i, step=step) for i in range(5)])
        for drawn in (tokens.unsqueeze(-1), alone.unsqueeze(-1)):
            high = ends.gather(-1, drawn).squeeze(-1)
            low = high - q.gather(-1, drawn).squeeze(-1)
            assert bool(((u >= low - 3e-6) & (u <= high + 3e-6)).all())


@pytest.mark.parametrize(
    "spec", ["bok:solver=exact", "bok:solver=exact,weights=uniform,temperature=0.8", "entmax:alpha=1.2"]
)
def test_optima_on_flat_rows_are_those_of_the_reference(spec):
    x, chosen, seeds = flat_rows(49_152), decoder(spec), torch.arange(5)
    q = chosen.distribution(x.double())
    ends = q.cumsum(-1)
    for step in range(12):
        tokens, u = chosen.sample(x, seeds=seeds, step=step).unsqueeze(-1), uniform(seeds, step)
        high = ends.gather(-1, tokens).squeeze(-1)
        low = high - q.gather(-1, tokens).squeeze(-1)
        assert bool(((u >= low - 3e-6) & (u <= high + 3e-6)).all())
        assert tokens.squeeze(-1).tolist() == [int(chosen.sample(x[i], seeds=i, step=step)) for i in range(5)]


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_what_is_left_out_of_an_exact_optimum_weighs_next_to_nothing(scale):
    """Best-of-K is drawn on the columns that weigh: sorted, their masses are the reference's largest."""
    x = scale * torch.randn(2, 20_000, generator=torch.Generator().manual_seed(3))
    chosen, masses = decoder("bok:solver=exact"), []
    problem = chosen.problem(x)

    def pick(mass):
        masses.append(mass.double())
        return torch.zeros(mass.shape[:-1], dtype=torch.int64)

    assert draw_coverage(problem, chosen.method(problem), block_maxima(x), pick) is not None
    found = (masses[0] / masses[0].sum(-1, keepdim=True)).sort(-1, descending=True).values
    assert found.shape[-1] < 5_000, "nothing was left out: the test shows nothing"
    q = chosen.distribution(x.double()).sort(-1, descending=True).values
    q[:, : found.shape[-1]] -= found
    assert 0.5 * q.abs().sum(-1).max() < 3e-6


@pytest.mark.parametrize("size", [20_000, 20_011])  # the second has no short divisor
@pytest.mark.parametrize("p", [0.9, 0.99])
def test_one_row_with_hundreds_in_its_nucleus(monkeypatch, size, p):
    """Scores that fall with the logarithm of the rank, some of them tied or forbidden: sorted without the rest."""
    sorted_by, answers = cpu_nucleus._by_sorting, []
    monkeypatch.setattr(cpu_nucleus, "_by_sorting", lambda *given: answers.append(sorted_by(*given)) or answers[-1])
    g, chosen = torch.Generator().manual_seed(size), decoder(f"top-p:p={p},temperature=0.8")
    x = (-1.7 * torch.log1p(torch.arange(size) / 60))[torch.randperm(size, generator=g)]
    halves, masked = x.bfloat16().float(), x + 1e4
    masked[::7] = -torch.inf
    for row in (x, halves, masked):
        q = chosen.distribution(row.double())
        ends = q.cumsum(-1)
        for seed in range(20):
            token, u = int(chosen.sample(row, seeds=seed)), float(uniform(torch.tensor(seed)))
            assert float(ends[token] - q[token]) - 1e-6 <= u <= float(ends[token]) + 1e-6
            assert q[token] > 0
    assert len(answers) == 60, "some row was not drawn this way"
    assert p > 0.9 or None not in answers


def awkward(kind: str, size: int = 1536) -> torch.Tensor:
    """A row whose nucleus is wide; tied: with equals at its edge; masked: a third is forbidden."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(5))
    masked = x.index_fill(0, torch.arange(0, size, 3), -torch.inf)
    return {"smooth": x, "tied": x.mul(2).round().div(2), "all alike": torch.zeros(size), "masked": masked}[kind]


@pytest.mark.parametrize("kind", ["smooth", "tied", "all alike", "masked"])
@pytest.mark.parametrize("rows", [1, 50])
@pytest.mark.parametrize("tries", [1, 16])
def test_draws_by_trial_follow_the_distribution(monkeypatch, kind, rows, tries):
    """Without seeds tokens of the whole row are tried; with one try half of the draws go on to find the edge."""
    monkeypatch.setattr(cpu_nucleus, "TRIES", tries)
    chosen, x, g = decoder("top-p:p=0.55"), awkward(kind), torch.Generator().manual_seed(11)
    among = x.expand(rows, -1) if rows > 1 else x.view(1, -1)
    tokens = torch.cat([chosen.sample(among, generator=g) for _ in range(15_000 // rows)])
    # a few hundred tokens at a time: the chance of each is the same there, and there are enough of it
    q = chosen.distribution(x.double())
    assert int(q[tokens].eq(0).sum()) == 0
    groups = torch.arange(len(x)) // 16
    assert chi_square(groups[tokens], torch.zeros(int(groups[-1]) + 1, dtype=q.dtype).index_add(0, groups, q)) > 1e-4
    assert len(tokens.unique()) > 0.5 * int((q > 0).sum())


def test_narrow_and_wide_rows_of_a_batch_are_drawn_without_seeds():
    chosen, g = decoder("top-p:p=0.8"), torch.Generator().manual_seed(3)
    narrow = torch.full((1536,), -20.0).index_fill(0, torch.tensor([7, 70, 700]), 0.0)
    rows = torch.stack([awkward("smooth"), narrow]).repeat(20, 1)
    tokens = torch.stack([chosen.sample(rows, generator=g) for _ in range(300)]).view(-1, 2)
    assert set(tokens[:, 1].tolist()) == {7, 70, 700}
    q = chosen.distribution(awkward("smooth"))
    assert int((q[tokens[:, 0]] == 0).sum()) == 0
    top = q > q.median()
    assert abs(float(top[tokens[:, 0]].double().mean()) - float(q[top].sum())) < 0.02


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1031, 20_011])  # without a short divisor
def test_tries_in_any_shape_and_precision(dtype, size):
    x = awkward("masked", size).to(dtype).expand(2, 3, -1)
    chosen, g = decoder("top-p:p=0.7"), torch.Generator().manual_seed(2)
    q = chosen.distribution(x)[0, 0]
    for scores in (x, x.transpose(0, 1), x[:1, :1]):
        tokens = torch.stack([chosen.sample(scores, generator=g) for _ in range(30)])
        assert tokens.shape[1:] == scores.shape[:-1]
        assert int((q[tokens] == 0).sum()) == 0
        assert len(tokens.unique()) > 0.5 * tokens.numel()


def test_a_forbidden_token_is_not_kept_be_its_mass_within_rounding():
    x = awkward("masked")
    e = cpu_nucleus._masses(x, float(x.max()), 1.0)
    assert not cpu_nucleus._kept(x, e, 0, 1.001 * float(e.sum()))
    assert cpu_nucleus._kept(x, e, 1, 1.001 * float(e.sum()))


def test_a_generator_draws_the_same_again():
    chosen, x = decoder("top-p:p=0.6"), awkward("smooth").expand(9, -1)
    first, second = (chosen.sample(x, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, second)
    assert len(first.unique()) > 5


@pytest.mark.parametrize("kind", ["smooth", "tied", "all alike", "masked"])
@pytest.mark.parametrize("p", [0.003, 0.55, 0.9])
def test_a_token_tells_by_one_sum_whether_it_is_in_the_nucleus(kind, p):
    x = awkward(kind)
    e = cpu_nucleus._masses(x, float(x.max()), 0.8)
    needed = p * float(e.double().sum())
    nucleus = prefix(e, torch.tensor([needed], dtype=torch.float64), x) > 0
    assert [cpu_nucleus._kept(x, e, token, needed) for token in range(len(x))] == nucleus.tolist()
    assert bool(nucleus.any())
