"""The optimum against cvxpy, and the certificate against the optimum: its gap bounds what any q leaves on the table."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import cvxpy as cp
import numpy as np
import pytest
import torch
from torch import Tensor

from simplexity import (
    KL,
    Allowed,
    Coverage,
    Everything,
    HalfSquare,
    MirrorAscent,
    NegEntropy,
    Problem,
    Regulariser,
    Support,
    TopK,
    Tsallis,
    Zero,
    certify,
    solve,
)


@dataclass
class Draw:
    """The numbers of one random problem."""

    scores: np.ndarray
    reference: np.ndarray
    weights: np.ndarray
    lam: float

    def on(self, kept: np.ndarray) -> "Draw":
        return Draw(self.scores[kept], self.reference[kept], self.weights[kept], self.lam)


@dataclass
class Family:
    """One Ω, stated three times: for the library, for cvxpy, and as a plain formula for numbers."""

    ours: Callable[[Draw], Regulariser]
    theirs: Callable[[cp.Variable, Draw], cp.Expression]
    value: Callable[[np.ndarray, Draw], float]
    solvers: tuple[str, ...] = ("dual-root",)
    weigh: Callable[[Draw], np.ndarray] = lambda d: d.weights
    trials: int = 12


def tensor(x: np.ndarray) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def xlogx(q: np.ndarray) -> np.ndarray:
    return q * np.log(np.where(q > 0, q, 1.0))


def kl(q: np.ndarray, d: Draw) -> float:
    return float((xlogx(q) - q * np.log(d.reference)).sum())


def tsallis(alpha: float, *solvers: str) -> Family:
    scale = alpha * (alpha - 1)
    return Family(
        lambda d: Tsallis(alpha),
        lambda q, d: (cp.sum(cp.power(q, alpha)) - cp.sum(q)) / scale,
        lambda q, d: float((q**alpha - q).sum() / scale),
        solvers,
    )


def best_of(k: int, beta: float, weigh: Callable[[Draw], np.ndarray]) -> Family:
    return Family(
        lambda d: KL.to(tensor(d.reference)) + beta * Coverage(k, tensor(d.weights)),
        lambda q, d: cp.sum(cp.rel_entr(q, d.reference)) - beta * (d.weights.sum() - d.weights @ cp.power(1 - q, k)),
        lambda q, d: kl(q, d) - beta * float((d.weights * (1 - (1 - q) ** k)).sum()),
        weigh=weigh,
    )


FAMILIES = {
    "zero": Family(lambda d: Zero(), lambda q, d: 0 * cp.sum(q), lambda q, d: 0.0, ("closed-form",)),
    "negative entropy": Family(
        lambda d: NegEntropy(),
        lambda q, d: -cp.sum(cp.entr(q)),
        lambda q, d: float(xlogx(q).sum()),
        ("closed-form", "dual-root"),
    ),
    "KL": Family(
        lambda d: KL.to(tensor(d.reference)),
        lambda q, d: cp.sum(cp.rel_entr(q, d.reference)),
        kl,
        ("closed-form", "dual-root"),
    ),
    "half square": Family(
        lambda d: HalfSquare(),
        lambda q, d: cp.sum_squares(q) / 2,
        lambda q, d: float((q * q).sum() / 2),
        ("closed-form", "dual-root"),
    ),
    "Tsallis 1.5": tsallis(1.5, "closed-form", "dual-root"),
    "Tsallis 1.25": tsallis(1.25, "dual-root"),
    "Tsallis 3": tsallis(3.0, "dual-root"),
    "best of 1, random weights": best_of(1, 0.7, lambda d: d.weights),
    "best of 2, random weights": best_of(2, 1.5, lambda d: d.weights),
    "best of 8, uniform": best_of(8, 0.3, lambda d: np.ones_like(d.weights)),
    "best of 8, the model's own": best_of(8, 0.5, lambda d: d.reference),
    "best of 16, the best three": best_of(16, 0.2, lambda d: (d.scores >= np.sort(d.scores)[-3]).astype(float)),
    # without a formula for the inverse of their slope, these are solved by a root within a root
    "entropy + half square": Family(
        lambda d: NegEntropy() + 0.5 * HalfSquare(),
        lambda q, d: -cp.sum(cp.entr(q)) + 0.25 * cp.sum_squares(q),
        lambda q, d: float(xlogx(q).sum() + 0.25 * (q * q).sum()),
        trials=4,
    ),
    "KL + Tsallis": Family(
        lambda d: 0.4 * KL.to(tensor(d.reference)) + Tsallis(1.5),
        lambda q, d: 0.4 * cp.sum(cp.rel_entr(q, d.reference)) + (cp.sum(cp.power(q, 1.5)) - cp.sum(q)) / 0.75,
        lambda q, d: 0.4 * kl(q, d) + float((q**1.5 - q).sum() / 0.75),
        trials=4,
    ),
    "coverage alone": Family(
        lambda d: Coverage(3, 0.7),  # one weight for all: only then is it known to be strictly convex
        lambda q, d: 0.7 * (cp.sum(cp.power(1 - q, 3)) - len(d.weights)),
        lambda q, d: -float((0.7 * (1 - (1 - q) ** 3)).sum()),
        trials=4,
    ),
}


def everything(scores: np.ndarray) -> tuple[Support, np.ndarray]:
    return Everything(), np.ones(len(scores), dtype=bool)


def best_four(scores: np.ndarray) -> tuple[Support, np.ndarray]:
    return TopK(4), scores >= np.sort(scores)[-4]


def even_ids(scores: np.ndarray) -> tuple[Support, np.ndarray]:
    return Allowed(list(range(0, len(scores), 2))), np.arange(len(scores)) % 2 == 0


SUPPORTS = {"everything": everything, "top-k": best_four, "allowed": even_ids}


def draws(family: Family, seed: int) -> list[Draw]:
    rng = np.random.default_rng(seed)
    found = []
    for v in rng.integers(5, 14, family.trials):
        reference = 0.999 * rng.dirichlet(np.full(v, 0.7)) + 0.001 / v
        d = Draw(rng.normal(0, 2, v), reference, rng.random(v), rng.uniform(0.1, 2.5))
        found.append(replace(d, weights=family.weigh(d)))
    return found


def posed(family: Family, support: str, d: Draw) -> tuple[Problem, np.ndarray]:
    rule, kept = SUPPORTS[support](d.scores)
    return Problem(tensor(d.scores), family.ours(d), lam=d.lam, support=rule), kept


def objective(family: Family, d: Draw, q: np.ndarray) -> float:
    return float(q @ d.scores) - d.lam * family.value(q, d)


def by_cvxpy(family: Family, d: Draw, kept: np.ndarray) -> np.ndarray:
    """cvxpy's best q, posed on the support alone, with the last rounding of feasibility repaired."""
    inside = d.on(kept)
    q = cp.Variable(kept.sum())
    problem = cp.Problem(cp.Maximize(inside.scores @ q - d.lam * family.theirs(q, inside)), [q >= 0, cp.sum(q) == 1])
    found = []
    for tolerance in (1e-11, 1e-10, 1e-9, 1e-8):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the tolerance was out of reach; what was reached is tested
            problem.solve(solver="CLARABEL", tol_gap_abs=tolerance, tol_gap_rel=tolerance, tol_feas=tolerance)
        full = np.zeros(len(kept))
        full[kept] = np.clip(q.value, 0.0, None)
        found.append(full / full.sum())
        if problem.status == "optimal":
            break
    return max(found, key=lambda q: objective(family, d, q))


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_optimum_is_that_of_cvxpy(name, support):
    family = FAMILIES[name]
    for d in draws(family, seed=1):
        problem, kept = posed(family, support, d)
        theirs = objective(family, d, by_cvxpy(family, d, kept))
        for solver in family.solvers:
            q = solve(problem, solver)
            assert not q[~torch.tensor(kept)].any()
            assert abs(q.sum().item() - 1) < 1e-12
            ours = objective(family, d, q.numpy())
            assert problem.objective(q).item() == pytest.approx(ours, abs=1e-12)
            assert ours == pytest.approx(theirs, abs=1e-7)
            assert ours > theirs - 1e-11  # cvxpy's q is feasible too: an exact solver cannot lose to it


def candidates(problem: Problem, optimum: Tensor, kept: np.ndarray, rng: np.random.Generator) -> Tensor:
    """Distributions on the support of every sort: flat, sharp, sparse, near the optimum, half-way to it."""
    allowed, optimum = np.flatnonzero(kept), optimum.numpy()
    points = [rng.dirichlet(np.full(len(allowed), a)) for a in (0.05, 0.3, 1.0, 20.0) for _ in range(15)]
    points += list(np.eye(len(allowed)))
    points += [0.5 * (np.eye(len(allowed))[0] + v) for v in np.eye(len(allowed))]
    for size in (1e-1, 1e-3, 1e-6, 1e-9):
        for _ in range(5):
            noisy = optimum[allowed] * np.exp(size * rng.normal(size=len(allowed)))
            points.append(noisy / noisy.sum())
            points.append((1 - size) * optimum[allowed] + size * rng.dirichlet(np.ones(len(allowed))))
    for v in range(len(allowed)):  # the optimum with one token cut
        cut = np.where(np.arange(len(allowed)) == v, 0.0, optimum[allowed])
        if cut.sum() > 0:
            points.append(cut / cut.sum())
    full = np.zeros((len(points), len(kept)))
    full[:, allowed] = points
    iterates = [
        solve(problem, MirrorAscent(steps=steps, step=step, geometry=geometry))
        for geometry in ("entropic", "euclidean")
        for steps, step in ((0, 0.1), (1, 0.1), (3, 0.3), (10, 0.1), (40, 0.05))
    ]
    return torch.cat([tensor(full), torch.stack(iterates)])


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_gap_bounds_the_suboptimality_of_every_q(name, support):
    family, rng = FAMILIES[name], np.random.default_rng(2)
    for d in draws(family, seed=3)[:5]:
        problem, kept = posed(family, support, d)
        optimum = solve(problem)
        points = candidates(problem, optimum, kept, rng)
        many = Problem(problem.scores.expand_as(points), problem.regulariser, lam=d.lam, support=problem.support)
        certificate = certify(many, points)
        best = objective(family, d, optimum.numpy())
        left = torch.tensor([best - objective(family, d, q.numpy()) for q in points], dtype=torch.float64)
        assert bool((left > -1e-12).all())  # nothing beats the optimum
        assert bool((certificate.gap >= left - 1e-12).all())
        assert bool((certificate.gap >= 0).all())
        assert bool((certificate.leak == 0).all())
        assert bool((certificate.mass_error < 1e-12).all())


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_gap_of_an_exact_solver_is_rounding_error(name, support):
    family = FAMILIES[name]
    for d in draws(family, seed=4):
        problem, _ = posed(family, support, d)
        for solver in family.solvers:
            certificate = certify(problem, solve(problem, solver))
            assert bool(certificate.holds(1e-9))
            assert bool(certificate.inactive_violation < 1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_multiplier_is_the_common_slope(name):
    # where every token is active, s − λ∇Ω(q) is one number on the whole support; cvxpy need not be asked
    family = FAMILIES[name]
    for d in draws(family, seed=5):
        problem, _ = posed(family, "everything", d)
        q = solve(problem)
        certificate = certify(problem, q)
        slopes = problem.gradient(q)[q > 1e-6]
        torch.testing.assert_close(slopes, certificate.multiplier.expand_as(slopes), rtol=0, atol=1e-8)


def test_gaps_of_tokens_that_underflow():
    # −2000 below the best, the true optimum of a token is smaller than any number: its zero is right
    s = torch.tensor([0.0, -1.0, -2000.0], dtype=torch.float64)
    for omega in (NegEntropy(), KL.to(torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)), NegEntropy() + Coverage(4)):
        problem = Problem(s, omega)
        q = solve(problem)
        assert q[2] == 0
        assert bool(certify(problem, q).gap < 1e-9)


# Somebody else's q


def softmax_problem(support: Support) -> Problem:
    return Problem(torch.tensor([2.0, 1.0, 0.5, -1.0, -torch.inf], dtype=torch.float64), NegEntropy(), support=support)


def test_a_wrong_mass_is_reported_and_does_not_hide_the_rest():
    problem = softmax_problem(Everything())
    optimum = solve(problem)
    for factor in (0.5, 0.999, 1.001, 3.0):
        certificate = certify(problem, factor * optimum)
        assert certificate.mass_error.item() == pytest.approx(abs(factor - 1), abs=1e-14)
        assert certificate.gap.item() == pytest.approx(0, abs=1e-12)  # all slopes move alike
        assert certificate.leak == 0
        assert not bool(certificate.holds(1e-4))


def test_mass_outside_the_support_is_a_leak():
    problem = softmax_problem(TopK(2))
    inside = solve(problem)
    leaky = 0.9 * inside + 0.1 * torch.tensor([0.0, 0.0, 0.3, 0.2, 0.5], dtype=torch.float64)
    certificate = certify(problem, leaky)
    assert certificate.leak.item() == pytest.approx(0.1, abs=1e-14)
    assert certificate.mass_error.item() == pytest.approx(0, abs=1e-14)
    assert not bool(certificate.holds(1e-3))
    assert certify(problem, inside).leak == 0


def test_a_token_wrongly_cut_shows():
    problem = softmax_problem(Everything())
    cut = solve(softmax_problem(TopK(3)))  # token 3 is missing
    certificate = certify(problem, cut)
    lost = problem.objective(solve(problem)) - problem.objective(cut)
    assert bool(certificate.gap >= lost)
    assert bool(certificate.inactive_violation > 100)  # the slope of q·log q at zero is infinite
    assert not bool(certificate.holds(1e-3))
    # the same q is right where the support ends
    assert bool(certify(softmax_problem(TopK(3)), cut).holds(1e-12))


def test_a_token_wrongly_cut_by_a_sparse_decoder():
    problem = Problem(torch.tensor([0.3, 0.2, 0.1, -5.0], dtype=torch.float64), HalfSquare())
    torch.testing.assert_close(solve(problem), tensor(np.array([13, 10, 7, 0]) / 30))
    # (s − q) is −0.25 on the first two, 0.1 on the third: it is cut by 0.35 too much
    certificate = certify(problem, torch.tensor([0.55, 0.45, 0.0, 0.0], dtype=torch.float64))
    assert certificate.multiplier.item() == pytest.approx(-0.25)
    assert certificate.active_residual.item() == pytest.approx(0, abs=1e-15)
    assert certificate.inactive_violation.item() == pytest.approx(0.35)
    assert certificate.gap.item() == pytest.approx(0.35)


def test_an_active_token_with_the_wrong_mass_shows():
    problem = Problem(torch.tensor([0.3, 0.2, -5.0], dtype=torch.float64), HalfSquare())
    certificate = certify(problem, torch.tensor([0.7, 0.1, 0.2], dtype=torch.float64))
    g = [0.3 - 0.7, 0.2 - 0.1, -5.0 - 0.2]
    eta = 0.7 * g[0] + 0.1 * g[1] + 0.2 * g[2]
    assert certificate.multiplier.item() == pytest.approx(eta)
    assert certificate.active_residual.item() == pytest.approx(max(abs(x - eta) for x in g))
    assert certificate.inactive_violation == 0
    assert certificate.gap.item() == pytest.approx(0.7 * (g[1] - g[0]) + 0.2 * (g[1] - g[2]))


def test_an_offset_of_the_scores_changes_no_gap():
    s = torch.tensor([2.0, 1.0, 0.5, -1.0], dtype=torch.float64)
    q = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    here, there = certify(Problem(s, NegEntropy()), q), certify(Problem(s + 1e6, NegEntropy()), q)
    assert here.gap.item() == pytest.approx(there.gap.item(), abs=1e-8)
    assert there.multiplier.item() - here.multiplier.item() == pytest.approx(1e6)


def test_a_float32_softmax_over_a_vocabulary_is_nearly_certified():
    # its mass is off by some 1e-6 to 1e-5, which must not turn into a wrong or negative gap
    s = 3 * torch.randn(2, 151_936, generator=torch.Generator().manual_seed(0)) + 1000
    certificate = certify(Problem(s, NegEntropy()), torch.softmax(s, -1))
    assert bool((certificate.gap >= 0).all())
    assert bool((certificate.gap < 1e-3).all())


@pytest.mark.parametrize("q", [[1.1, -0.1, 0.0], [0.0, 0.0, 0.0], [float("nan"), 0.5, 0.5]])
def test_what_is_no_distribution_never_holds(q):
    # with a negative entry the bound means nothing, however small it comes out
    problem = Problem(torch.tensor([0.0, -1.0, -1.0], dtype=torch.float64), Zero(), lam=0.0)
    assert not bool(certify(problem, torch.tensor(q, dtype=torch.float64)).holds(1e-6))
