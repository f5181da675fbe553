"""float32 at V = 151,936, where a plain softmax no longer sums to one."""

import pytest
import torch

from simplexity import MirrorAscent, NegEntropy, Problem, decoder, solve
from simplexity.solvers.dual_root import dual_root

V = 151_936
SPECS = [
    "greedy",
    "softmax",
    "top-k",
    "top-p",
    "sparsemax",
    "entmax",
    "entmax:alpha=1.2",
    "kl",
    "bok:solver=exact",
    "bok:solver=exact,weights=top-m",
    "bok:solver=exact,weights=uniform,beta=1",
]


def rows() -> torch.Tensor:
    g = torch.Generator().manual_seed(3)
    peaked = torch.randn(2, V, generator=g) * 2.5 - 20
    peaked[:, :200] += torch.linspace(50, 10, 200)  # a head like a language model's, 60 above the floor
    peaked[0, 1000:2000] = -float("inf")
    flat = torch.randn(1, V, generator=g) * 0.01
    return torch.cat([peaked, flat])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", SPECS)
def test_gap_and_mass(spec, dtype):
    scores = rows().to(dtype)
    assert (scores[1].max() - scores[1].min()) >= 60
    d = decoder(spec)
    q = d.distribution(scores)
    certificate = d.certify(scores)
    assert torch.isfinite(q).all()
    assert (certificate.gap < 1e-4).all(), certificate
    assert (certificate.mass_error < 1e-6).all(), certificate
    assert (certificate.leak == 0).all()


@pytest.mark.parametrize("spec", ["bok", "bok:weights=top-m", "bok:weights=rank", "bok:steps=20,lam=0.5,beta=0.05"])
def test_mirror_steps_in_float32_match_float64(spec):
    scores = rows()
    d = decoder(spec)
    q = d.distribution(scores)
    assert (q.double().sum(-1) - 1).abs().max() < 1e-6
    assert (q.double() - d.distribution(scores.double())).abs().sum(-1).max() < 2e-5


def test_the_dual_root_at_this_size():
    problem = Problem(rows()[1:2], NegEntropy())
    torch.testing.assert_close(dual_root(problem, True), solve(problem), atol=1e-7, rtol=1e-5)


def test_what_all_tokens_share_costs_an_ascent_no_mass():
    class Lifted:
        def value(self, q):
            return torch.xlogy(q, q).sum(-1) + 1000 * q.sum(-1)

        def smoothness(self, geometry):
            return 1.0

    q = solve(Problem(rows(), Lifted()), MirrorAscent(steps=3))  # pyright: ignore
    assert (q.double().sum(-1) - 1).abs().max() < 1e-6
