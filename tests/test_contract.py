"""What every decoder promises, whoever wrote it: run over the registry, so a new one is tested by existing."""

import pytest
import torch

from conftest import KINDS, ready, rows_of
from simplexity import certify, decoder, decoders, solve

# Every name at its defaults, and settings that take another path through the solvers.
SPECS = [
    *decoders(),
    "softmax:temperature=0.3",
    "top-k:k=3,temperature=2",
    "top-p:p=0.5,temperature=1.5,temperature_last=true",
    "sparsemax:lam=30",
    "entmax:alpha=1.2,lam=4",
    "entmax:alpha=3",
    "kl:lam=0.5,temperature=2",
    "min-p:p=0.02,temperature=1.5,temperature_last=true",
    "typical:p=0.3,temperature=2",
    "epsilon:epsilon=0.05",
    "eta:epsilon=0.2,temperature=0.7",
    "top-n-sigma:n=3",
    "top-h:h=0.9,temperature=2",
    "xtc:probability=1,threshold=0.01",
    "adaptive:theta=0.1,temperature=2",
    "js:lam=20,temperature=2",
    "bok:solver=exact,weights=frontier,beta=3,temperature=2",
    "guidance:scale=0",
    "guidance:scale=3,temperature=0.5",
    "contrastive:alpha=0.001,expert=1.5,amateur=0.5,temperature=2",
    "controlled:lam=0.2,temperature=1.5",
    "bok:solver=exact",
    "bok:solver=exact,weights=uniform,beta=2,scores=none",
    "bok:weights=top-m,m=3,beta=1,k=4,lam=1,scores=logprobs",
    "bok:solver=exact,weights=rank,beta=20,k=64,lam=0.5",
]
EXACT = [spec for spec in SPECS if not spec.startswith("bok") or "solver=exact" in spec]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS)
def test_q_is_a_distribution_on_the_support(spec, kind):
    scores = rows_of(kind)
    d = ready(spec)
    q = d.distribution(scores)
    assert q.dtype == (torch.float64 if kind == "float64" else torch.float32)
    assert q.shape == scores.shape
    assert torch.isfinite(q).all()
    assert (q >= 0).all()
    torch.testing.assert_close(q.double().sum(-1), torch.ones(3).double(), atol=1e-6, rtol=0)
    mask = d.problem(scores.to(q.dtype)).mask()
    assert (q[~mask] == 0).all()
    assert mask.any(-1).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", EXACT)
def test_exact_decoders_are_certified(spec, kind):
    scores = rows_of(kind)
    certificate = ready(spec).certify(scores)
    # float32 cannot say a score of 1e6 to better than 0.06, nor one of 100 to better than 1e-5
    span = scores.double().masked_fill(scores == -torch.inf, 0.0).abs().amax()
    assert (certificate.gap >= 0).all()
    assert (certificate.gap <= (1e-9 if kind == "float64" else max(1e-4, 2e-7 * span))).all()
    assert (certificate.mass_error <= 1e-6).all()
    assert (certificate.leak == 0).all()


@pytest.mark.parametrize("spec", SPECS)
def test_a_constant_on_all_scores_changes_nothing(spec):
    scores = rows_of("float64")
    d = ready(spec)
    torch.testing.assert_close(d.distribution(scores + 1000), d.distribution(scores), atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", ["normal", "masked", "tied", "peaked"])
@pytest.mark.parametrize("spec", SPECS)
def test_rows_do_not_feel_their_neighbours(spec, kind):
    scores = rows_of(kind)
    d = ready(spec)
    together = d.distribution(scores)
    for i, row in enumerate(scores):
        torch.testing.assert_close(d.distribution(row), together[i], atol=1e-6, rtol=1e-5)
    seeds = torch.tensor([5, 6, 7])
    drawn = torch.stack([d.sample(scores, seeds=seeds, step=step) for step in range(8)])
    alone = torch.stack(
        [
            torch.stack([d.sample(scores[i : i + 1], seeds=seeds[i : i + 1], step=step)[0] for i in range(3)])
            for step in range(8)
        ]
    )
    assert (drawn == alone).all()
    flipped = torch.stack([d.sample(scores.flip(0), seeds=seeds.flip(0), step=step).flip(0) for step in range(8)])
    assert (drawn == flipped).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS)
def test_draws_stay_inside_the_support(spec, kind):
    scores = rows_of(kind)
    d = ready(spec)
    tokens = torch.stack([d.sample(scores) for _ in range(20)])
    assert tokens.dtype == torch.int64
    assert tokens.shape == (20, 3)
    assert (d.distribution(scores).gather(-1, tokens.T) > 0).all()
    assert (d.mode(scores) == d.distribution(scores).argmax(-1)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS)
def test_the_path_without_host_reads_gives_the_same_q(spec, kind):
    scores = rows_of(kind)
    d = ready(spec)
    q, status = d.distribution(scores, validate=False)
    assert (status == 0).all()
    # "huge" scores leave the last bits of a sum to chance; a nucleus may then gain or lose a token at its edge
    torch.testing.assert_close(q, d.distribution(scores), atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(7,), (0, 7), (2, 3, 7), (1, 7)])
def test_any_batch_shape(spec, shape):
    scores = torch.randn(shape)
    d = ready(spec)
    assert d.distribution(scores).shape == shape
    assert d.sample(scores).shape == shape[:-1]
    assert d.describe(scores).entropy.shape == shape[:-1]
    q, status = d.distribution(scores, validate=False)
    assert (q.shape, status.shape) == (shape, shape[:-1])


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_comes_back(spec):
    d = decoder(spec)
    assert decoder(str(d)) == d
    assert decoder(d.to_json()) == d


@pytest.mark.parametrize("spec", SPECS)
def test_solve_and_certify_take_the_problem_as_they_find_it(spec):
    scores = rows_of("float64")
    problem = ready(spec).problem(scores)
    certificate = certify(problem, solve(problem))
    assert (certificate.gap < 1e-9).all()
