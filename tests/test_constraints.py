"""Constraints: the optimum against cvxpy, the certificate over the set, what is refused, what must not be ignored."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import cvxpy as cp
import numpy as np
import pytest
import torch
from torch import Tensor

import simplexity as sx
from simplexity import (
    KL,
    Caps,
    Context,
    Coverage,
    EntropyFloor,
    GroupBounds,
    GroupNorm,
    HalfSquare,
    KLBall,
    MirrorAscent,
    NegEntropy,
    Problem,
    Status,
    TopK,
    Tsallis,
    Zero,
    certify,
    decoder,
    project_to_simplex,
    solve,
)
from simplexity.draw import ByNumber
from simplexity.kernels import draw_fused
from simplexity.kernels.plans import plan_for
from simplexity.roots import find_root_below
from simplexity.rows import block_maxima
from test_no_host_reads import NoReads

INF = float("inf")
SIZE = 12
GROUPS = [[0, 3, 5], [1, 2], [4, 7, 8, 11]]  # 6, 9 and 10 are in none
INDEX = torch.tensor([0, 1, 1, 0, 2, 0, -1, 2, 2, -1, -1, 2])


def exactly(*numbers: object) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def entropy(q: Tensor) -> Tensor:
    return -torch.xlogy(q, q).sum(-1)


class Rows:
    """Random problems, one a row, in float64: some tokens forbidden, some scores tied."""

    def __init__(self, n: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        scores = 2.5 * torch.randn(n, SIZE, generator=g).double()
        scores[::4] = scores[::4].round()
        scores[1::3, 2] = -INF
        scores[2::5, 7:9] = -INF
        self.scores, self.lam = scores, torch.rand(n, generator=g).double() * 2 + 0.1
        self.reference = 0.99 * torch.rand(n, SIZE, generator=g).double().pow(3) + 0.01
        self.reference /= self.reference.sum(-1, keepdim=True)
        self.u = torch.rand(n, SIZE, generator=g).double()

    def caps(self) -> Tensor:
        return 0.15 + 0.4 * self.u  # 9 tokens at least

    def caps_per_row(self) -> Tensor:
        return 0.12 + 0.6 * self.u[:, :1]

    def bounds(self) -> tuple[Tensor, Tensor]:
        lower = 0.3 * self.u[:, :3]
        return lower, lower + 0.5 * self.u[:, 3:6]

    def floors(self) -> Tensor:
        return 0.3 + 1.7 * self.u[:, 0]

    def radii(self) -> Tensor:
        # with tokens forbidden, the nearest distribution is −log r(allowed) away
        allowed = torch.where(self.scores > -INF, self.reference, 0.0).sum(-1)
        return -allowed.log() + 0.01 + self.u[:, 0]


Ours = Callable[[Rows], tuple[sx.Constraint, ...]]
Theirs = Callable[[cp.Variable, Rows, int, np.ndarray], list]


def their_bounds(q: cp.Variable, rows: Rows, i: int, kept: np.ndarray) -> list:
    lower, upper = (x[i].tolist() for x in rows.bounds())
    made = []
    for ids, low, high in zip(GROUPS, lower, upper, strict=True):
        inside = [j for j, token in enumerate(np.flatnonzero(kept)) if token in ids]
        made += [cp.sum(q[inside]) >= low, cp.sum(q[inside]) <= high]
    return made


SETS: dict[str, tuple[Ours, Theirs]] = {
    "caps per token": (
        lambda rows: (Caps(rows.caps()),),
        lambda q, rows, i, kept: [q <= rows.caps()[i].numpy()[kept]],
    ),
    "caps per row": (
        lambda rows: (Caps(rows.caps_per_row()),),
        lambda q, rows, i, kept: [q <= rows.caps_per_row()[i].item()],
    ),
    "groups": (lambda rows: (GroupBounds(GROUPS, *rows.bounds()),), their_bounds),
    "groups and caps": (
        lambda rows: (GroupBounds(INDEX, *rows.bounds()), Caps(0.45)),
        lambda q, rows, i, kept: [*their_bounds(q, rows, i, kept), q <= 0.45],
    ),
    "entropy": (
        lambda rows: (EntropyFloor(rows.floors()),),
        lambda q, rows, i, kept: [cp.sum(cp.entr(q)) >= rows.floors()[i].item()],
    ),
    "KL": (
        lambda rows: (KLBall(rows.radii(), rows.reference.log()),),
        lambda q, rows, i, kept: [
            cp.sum(cp.rel_entr(q, rows.reference[i].numpy()[kept])) <= rows.radii()[i].item(),
        ],
    ),
    "entropy and groups": (
        lambda rows: (EntropyFloor(0.5 * rows.floors()), GroupBounds(GROUPS, *rows.bounds())),
        lambda q, rows, i, kept: [
            *their_bounds(q, rows, i, kept),
            cp.sum(cp.entr(q)) >= 0.5 * rows.floors()[i].item(),
        ],
    ),
    "none": (lambda rows: (), lambda q, rows, i, kept: []),
}


def norms(q: cp.Variable, kept: np.ndarray) -> cp.Expression:
    tokens = np.flatnonzero(kept)
    return sum(cp.norm(q[[j for j, token in enumerate(tokens) if token in ids]]) for ids in GROUPS)


OMEGAS = {
    "zero": (lambda rows: Zero(), lambda q, r, kept: 0 * cp.sum(q)),
    "entropy": (lambda rows: NegEntropy(), lambda q, r, kept: -cp.sum(cp.entr(q))),
    "KL": (lambda rows: KL(rows.reference.log()), lambda q, r, kept: cp.sum(cp.rel_entr(q, r))),
    "half square": (lambda rows: HalfSquare(), lambda q, r, kept: cp.sum_squares(q) / 2),
    "Tsallis": (lambda rows: Tsallis(1.5), lambda q, r, kept: (cp.sum(cp.power(q, 1.5)) - cp.sum(q)) / 0.75),
    "entropy and norms": (
        lambda rows: NegEntropy() + 1.5 * GroupNorm(GROUPS),
        lambda q, r, kept: -cp.sum(cp.entr(q)) + 1.5 * norms(q, kept),
    ),
}

CASES = [
    *((kind, "entropy") for kind in SETS if kind != "none"),
    *((kind, "half square") for kind in ("caps per token", "groups", "groups and caps", "entropy", "KL")),
    *((kind, "zero") for kind in ("caps per token", "groups and caps", "entropy", "KL", "entropy and groups")),
    ("groups and caps", "Tsallis"),
    ("groups", "KL"),
    ("KL", "KL"),
    ("none", "entropy and norms"),
    ("groups", "entropy and norms"),
    ("entropy", "entropy and norms"),
]


def by_cvxpy(rows: Rows, i: int, omega: str, theirs: Theirs) -> float:
    kept = (rows.scores[i] > -INF).numpy()
    s, r, lam = rows.scores[i].numpy()[kept], rows.reference[i].numpy()[kept], rows.lam[i].item()
    q = cp.Variable(int(kept.sum()))
    objective = cp.Maximize(s @ q - lam * OMEGAS[omega][1](q, r, kept))
    problem = cp.Problem(objective, [q >= 0, cp.sum(q) == 1, *theirs(q, rows, i, kept)])
    for tolerance in (1e-9, 1e-8, 1e-7):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the tolerance was out of reach; then a coarser one is tried
            problem.solve(solver="CLARABEL", tol_gap_abs=tolerance, tol_gap_rel=tolerance, tol_feas=tolerance)
        if problem.status == "optimal":
            break
    assert problem.status in ("optimal", "optimal_inaccurate")
    q.save_value(np.clip(q.value, 0.0, None))  # a power of −1e-12 is no number
    return float(objective.value)


def compare(kind: str, omega: str, n: int) -> None:
    rows = Rows(n, seed=n)
    ours, theirs = SETS[kind]
    problem = Problem(rows.scores, OMEGAS[omega][0](rows), lam=rows.lam, constraints=ours(rows))
    q = solve(problem)
    certificate = certify(problem, q)
    assert bool(certificate.holds(1e-6).all()), certificate
    assert bool((certificate.leak == 0).all())
    assert bool((q[rows.scores == -INF] == 0).all())
    best = torch.tensor([by_cvxpy(rows, i, omega, theirs) for i in range(n)], dtype=torch.float64)
    torch.testing.assert_close(problem.objective(q), best, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("kind", "omega"), CASES)
def test_the_optimum_is_that_of_cvxpy(kind, omega):
    compare(kind, omega, 10)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "omega"), CASES)
def test_two_hundred_optima_are_those_of_cvxpy(kind, omega):
    compare(kind, omega, 200)


def some(kind: str, omega: str = "entropy", n: int = 6, seed: int = 0) -> Problem:
    rows = Rows(n, seed)
    return Problem(rows.scores, OMEGAS[omega][0](rows), lam=rows.lam, constraints=SETS[kind][0](rows))


KINDS = [kind for kind in SETS if kind != "none"]


# a Euclidean step inside a ball is a root in a root: those would take minutes
CLIMBS = [(kind, "entropic") for kind in KINDS if kind != "entropy and groups"]
CLIMBS += [(kind, "euclidean") for kind, _ in CLIMBS if kind not in ("entropy", "KL")]


@pytest.mark.parametrize(("kind", "geometry"), CLIMBS)
def test_mirror_ascent_finds_the_same(kind, geometry):
    problem = some(kind, "entropy" if geometry == "entropic" else "half square", n=3)
    climbed = solve(problem, MirrorAscent(geometry=geometry, tolerance=1e-7))
    assert bool(certify(problem, climbed).holds(1e-6).all())
    assert bool((problem.objective(solve(problem)) - problem.objective(climbed) < 1e-6).all())
    for steps in (0, 2):  # it starts within the set, and stays
        early = certify(problem, solve(problem, MirrorAscent(geometry=geometry, steps=steps, step=0.1)))
        assert bool((early.violation < 1e-9).all())


@pytest.mark.parametrize("omega", ["entropy", "half square", "zero"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gap_bounds_the_suboptimality_of_every_q_in_the_set(kind, omega):
    problem = some(kind, omega, n=4)
    optimum = solve(problem)
    best = problem.objective(optimum)
    g = torch.Generator().manual_seed(5)
    noise = torch.randn(3, 4, SIZE, generator=g).double()
    for scores in (problem.scores + size * x for size, x in zip((0.01, 1.0, 10.0), noise, strict=True)):
        other = solve(replace(problem, scores=scores, lam=1.0, regulariser=NegEntropy()))
        for t in (1.0, 0.1, 1e-4):  # the set is convex: so is every point between
            q = (1 - t) * optimum + t * other
            certificate = certify(problem, q)
            assert bool((certificate.violation < 1e-9).all())
            left = best - problem.objective(q)
            assert bool((left > -1e-9).all())
            assert bool((certificate.gap >= left - 1e-9).all())


@pytest.mark.parametrize("kind", KINDS)
def test_the_certificate_tells_a_q_outside_the_set(kind):
    problem = some(kind)
    free = solve(replace(problem, constraints=()))
    certificate = certify(problem, free)
    outside = certificate.violation > 1e-3
    assert bool(outside.any())
    assert not bool(certificate.holds(1e-3)[outside].any())
    assert bool((certify(replace(problem, constraints=()), free).violation == 0).all())


@pytest.mark.parametrize(
    ("constraint", "by"),
    [
        (Caps(0.5), 0.2),
        (GroupBounds([[0], [2]], upper=0.6), 0.1),
        (GroupBounds([[0], [2]], lower=0.15), 0.05),
        (EntropyFloor(1.0), 1.0 - 0.8018185525),
        (KLBall(0.1, torch.zeros(3)), 1.0986122887 - 0.8018185525 - 0.1),
    ],
    ids=["cap", "upper", "lower", "entropy", "KL"],
)
def test_a_violation_is_measured(constraint, by):
    problem = Problem(torch.zeros(3).double(), NegEntropy(), constraints=(constraint,))
    assert certify(problem, exactly(0.7, 0.2, 0.1)).violation.item() == pytest.approx(by, abs=1e-9)


def test_a_constraint_that_is_not_felt_changes_nothing():
    s = torch.randn(3, 50).double()
    free = torch.softmax(s, -1)
    for loose in (Caps(1.0), GroupBounds([[1, 2], [4]]), EntropyFloor(0.0), KLBall(50.0, torch.zeros(3, 50))):
        torch.testing.assert_close(solve(Problem(s, NegEntropy(), constraints=(loose,))), free, atol=1e-12, rtol=0)


# what the solutions look like, by hand


def test_caps_are_filled_like_water():
    s = exactly(5.0, 1.0, 0.0, -INF)
    q = solve(Problem(s, NegEntropy(), constraints=(Caps(0.5),)))
    rest = 0.5 * torch.softmax(s[1:3], -1)
    torch.testing.assert_close(q, exactly(0.5, rest[0], rest[1], 0.0), atol=1e-12, rtol=0)


def test_without_a_regulariser_caps_are_filled_best_first():
    s = exactly([1.0, 3.0, 2.0, 3.0, -INF], [0.0, -INF, -INF, 5.0, 1.0])
    q = solve(Problem(s, Zero(), constraints=(Caps(0.4),)))
    expected = exactly([0.0, 0.4, 0.2, 0.4, 0.0], [0.2, 0.0, 0.0, 0.4, 0.4])
    torch.testing.assert_close(q, expected, atol=1e-12, rtol=0)
    # λ = 0 in one row of many, and as a number
    torch.testing.assert_close(
        solve(Problem(s, NegEntropy(), lam=torch.tensor([0.0, 1.0]), constraints=(Caps(0.4),)))[0], expected[0]
    )
    torch.testing.assert_close(solve(Problem(s, HalfSquare(), lam=0.0, constraints=(Caps(0.4),))), expected)
    bounds = GroupBounds([[0, 2], [1]], lower=[0.3, 0.0], upper=[1.0, 0.25])
    q = solve(Problem(s[0], Zero(), constraints=(bounds, Caps(0.4))))
    torch.testing.assert_close(q, exactly(0.0, 0.25, 0.35, 0.4, 0.0), atol=1e-12, rtol=0)


def test_bounds_on_groups_are_factors():
    s = exactly(3.0, 1.0, 0.5, 0.0, -2000.0)
    p = torch.softmax(s, -1)
    q = solve(Problem(s, NegEntropy(), constraints=(GroupBounds([[0], [4]], lower=[0.0, 0.1], upper=[0.2, 1.0]),)))
    assert q[0].item() == pytest.approx(0.2, abs=1e-12)
    assert q[4].item() == pytest.approx(0.1, abs=1e-12)  # however unlikely, its bound holds
    torch.testing.assert_close(q[1:4], 0.7 * p[1:4] / p[1:4].sum(), atol=1e-12, rtol=0)


def test_an_entropy_floor_is_a_temperature_where_it_is_felt():
    s = 4 * torch.randn(5, 40, generator=torch.Generator().manual_seed(1)).double()
    h = exactly(0.0, 1.0, 2.0, 3.0, np.log(40))
    q = solve(Problem(s, NegEntropy(), constraints=(EntropyFloor(h),)))
    plain = torch.softmax(s, -1)
    felt = entropy(plain) < h
    assert felt.tolist()[0] is False
    assert felt.tolist()[3:] == [True, True]
    torch.testing.assert_close(q[~felt], plain[~felt], atol=1e-14, rtol=0)
    torch.testing.assert_close(entropy(q)[felt], h[felt], atol=1e-10, rtol=0)
    torch.testing.assert_close(q[4], torch.full((40,), 1 / 40).double(), atol=1e-8, rtol=0)
    for row, target in ((3, 3.0), (4, None)):
        if target:
            hot = decoder(f"softmax:entropy={target}").distribution(s[row])
            torch.testing.assert_close(q[row], hot, atol=1e-8, rtol=0)


def test_a_kl_ball_is_as_greedy_as_epsilon_allows():
    s = torch.tensor([[2.0, 1.0, 0.0]] * 4).double()
    p = torch.softmax(s, -1)
    epsilon = torch.tensor([0.0, 0.05, 0.2, 9.0])
    q = solve(Problem(s, Zero(), constraints=(KLBall(epsilon, s),)))
    torch.testing.assert_close(q[0], p[0], atol=1e-7, rtol=0)
    torch.testing.assert_close(q[3], exactly(1.0, 0.0, 0.0))
    used = torch.xlogy(q, q / p).sum(-1)
    torch.testing.assert_close(used[1:3], epsilon[1:3].double(), atol=1e-9, rtol=0)
    # tied for the best: both, in the reference's proportions
    tied = exactly(1.0, 1.0, -3.0)
    q = solve(Problem(tied, Zero(), constraints=(KLBall(0.05, tied),)))
    torch.testing.assert_close(q, exactly(0.5, 0.5, 0.0), atol=1e-9, rtol=0)
    # a token that the reference forbids is forbidden
    q = solve(Problem(s[0], Zero(), constraints=(KLBall(9.0, torch.tensor([-INF, 0.0, 0.0])),)))
    assert q.tolist() == [0.0, 1.0, 0.0]


def test_group_norms_gather_mass_in_few_groups():
    s = exactly(2.0, 1.9, 1.8, 1.8)
    omega = NegEntropy() + 3 * GroupNorm([[0], [1], [2, 3]])
    q = solve(Problem(s, omega))
    assert certify(Problem(s, omega), q).gap < 1e-9
    assert q[2] + q[3] > 2 * (torch.softmax(s, -1)[2:].sum() - 0.25)
    value = GroupNorm(torch.tensor([0, 1, 2, 2])).value(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    assert value.item() == pytest.approx(0.1 + 0.2 + 0.5)
    # its slope, also where squares underflow
    q = exactly(0.2, 0.3, 3e-200, 4e-200, 0.5)
    slope = GroupNorm([[0, 1], [2, 3]]).grad(q)
    expected = exactly(0.2 / 0.13**0.5, 0.3 / 0.13**0.5, 0.6, 0.8, 0.0)
    torch.testing.assert_close(slope, expected)


def test_sums_of_an_entropy_and_a_power_are_inverted_by_formula():
    from simplexity.solvers.slopes import at_slope, invert

    q = torch.cat([torch.rand(500).double(), torch.exp(-600 * torch.rand(500).double())])
    for omega in (
        NegEntropy() + 0.5 * HalfSquare(),
        0.01 * NegEntropy() + HalfSquare(),
        0.3 * KL.to(torch.rand(1000).double()) + 2 * Tsallis(1.3),
        NegEntropy() + 5 * Tsallis(3.0),
    ):
        torch.testing.assert_close(at_slope(omega, omega.grad(q), True), q, atol=0, rtol=1e-11)
        torch.testing.assert_close(invert(omega, omega.grad(q), True), q, atol=0, rtol=1e-11)


def test_a_root_known_to_rounding_error_ends_the_search():
    asked = []

    def f(eta: Tensor) -> Tensor:
        asked.append(eta)
        return torch.exp(x - eta).clamp_max(0.05).sum(-1, keepdim=True).log()

    x = 6 * torch.randn(8, 500, generator=torch.Generator().manual_seed(0)).double()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True) + 10
    root = find_root_below(f, low, high, torch.ones_like(high), True, 1e-13)
    assert len(asked) < 30
    torch.testing.assert_close(f(root), torch.zeros_like(root), atol=1e-12, rtol=0)
    # the precision does not suffer from a bracket that is much too wide
    far = find_root_below(f, low - 1e30, high, torch.ones_like(high), True, 1e-13)
    torch.testing.assert_close(far, root, atol=1e-10, rtol=0)


# batches, parameters per row, edges


BATCHES = [(kind, omega) for kind in KINDS for omega in ("entropy", "half square", "zero")]
BATCHES.remove(("entropy and groups", "half square"))  # the same path as with an entropy floor alone, a minute longer


@pytest.mark.parametrize(("kind", "omega"), BATCHES)
def test_rows_do_not_feel_their_neighbours(kind, omega):
    rows = Rows(3, 3)
    problem = Problem(rows.scores, OMEGAS[omega][0](rows), lam=rows.lam, constraints=SETS[kind][0](rows))
    together = solve(problem)
    lower, upper = rows.bounds()
    for i in range(3):
        alone: dict[str, tuple] = {
            "caps per token": (Caps(rows.caps()[i]),),
            "caps per row": (Caps(rows.caps_per_row()[i].item()),),
            "groups": (GroupBounds(GROUPS, lower[i].tolist(), upper[i]),),
            "groups and caps": (GroupBounds(INDEX, lower[i], upper[i].tolist()), Caps(0.45)),
            "entropy": (EntropyFloor(rows.floors()[i].item()),),
            "KL": (KLBall(rows.radii()[i], rows.reference[i].log()),),
            "entropy and groups": (EntropyFloor(0.5 * rows.floors()[i]), GroupBounds(INDEX, lower[i], upper[i])),
        }
        single = Problem(rows.scores[i], OMEGAS[omega][0](rows), lam=rows.lam[i].item(), constraints=alone[kind])
        torch.testing.assert_close(solve(single), together[i], atol=1e-8, rtol=0)


@pytest.mark.parametrize("shape", [(7,), (0, 7), (2, 3, 7)])
def test_any_batch_shape(shape):
    s = torch.randn(shape)
    for constraint in (Caps(0.5), GroupBounds([[0, 1]], 0.1, 0.3), EntropyFloor(1.0), KLBall(0.2, s)):
        for omega in (NegEntropy(), Zero()):
            q, status = solve(Problem(s, omega, constraints=(constraint,)), validate=False)
            assert (q.shape, status.shape) == (shape, shape[:-1])
            torch.testing.assert_close(solve(Problem(s, omega, constraints=(constraint,))), q, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_support_and_a_constraint(kind):
    problem = replace(some(kind), support=TopK(9))
    if kind == "KL":  # the ball is around a reference on all tokens: not every support reaches it
        with pytest.raises(ValueError, match="too far"):
            solve(problem)
        rows = Rows(6, 0)
        problem = replace(problem, constraints=(KLBall(rows.radii() + 2, rows.reference.log()),))
    q = solve(problem)
    assert not bool(q[~TopK(9).mask(problem.scores)].any())
    assert bool(certify(problem, q).holds(1e-8).all())


def test_one_allowed_token():
    s = torch.tensor([[-INF, 2.0, -INF], [-INF, 2.0, 1.0]])
    for spec in ("capped:cap=0.6", "entropy-floor:h=0.5", "kl-ball"):
        d = decoder(spec)
        assert d.distribution(s)[0].tolist() == [0.0, 1.0, 0.0]
        assert d.sample(s, seeds=[1, 2])[0] == 1
        masked = d.distribution(torch.randn(2, 3), Context(mask=s > -INF))
        assert masked[0].tolist() == [0.0, 1.0, 0.0]
        assert bool((d.distribution(s, validate=False)[1] == 0).all())
    with pytest.raises(ValueError, match=r"row 0: .*the caps"):
        solve(Problem(s, NegEntropy(), constraints=(Caps(0.6),)))


def test_scores_of_absurd_size():
    s = torch.tensor([[0.0, -1.0, -2.0, -3e38], [1e4, 0.0, -1e4, 3e4]])
    for constraint in (Caps(0.4), GroupBounds([[0], [1, 2]], 0.1, 0.6), EntropyFloor(0.9), KLBall(0.3, torch.zeros(4))):
        for omega in (NegEntropy(), Zero(), HalfSquare()):
            problem = Problem(s, omega, constraints=(constraint,))
            certificate = certify(problem, solve(problem))
            assert bool((certificate.mass_error < 1e-6).all())
            assert bool((certificate.violation < 1e-5).all())
            assert bool((certificate.gap[0] < 1e-4 * (1 if constraint.__class__ is not GroupBounds else 1e38)).all())


# what is refused


def test_solvers_that_cannot_say_which_can():
    problem = some("caps per row")
    with pytest.raises(ValueError, match=r"closed-form cannot .* These can: dual-root, mirror-ascent"):
        solve(problem, "closed-form")
    with pytest.raises(ValueError, match=r"dual-root cannot .* These can: mirror-ascent"):
        solve(replace(problem, regulariser=NegEntropy() + GroupNorm(GROUPS)), "dual-root")
    with pytest.raises(ValueError, match=r"dual-root cannot .* These can: closed-form, mirror-ascent"):
        solve(replace(problem, lam=0.0), "dual-root")


S = torch.zeros(2, 4)
S[1, 2:] = -INF
IMPOSSIBLE = {
    "caps": (Caps(0.3), "row 1: no distribution .* leave room for less than 1"),
    "caps of one row": (Caps(torch.tensor([0.2, 0.6])), "row 0: no distribution .* leave room for less than 1"),
    "upper bounds": (GroupBounds([[0, 1], [2, 3]], 0.0, [0.4, 0.5]), "rows 0, 1: .* leave room for less than 1"),
    "lower bounds": (GroupBounds([[0], [1]], [0.7, 0.6]), "rows 0, 1: .* sum to more than 1"),
    "a group without tokens": (GroupBounds([[2, 3]], 0.2), "row 1: .* what its allowed tokens can hold"),
    "entropy": (EntropyFloor(1.0), "row 1: .* the logarithm of their number"),
    "KL": (KLBall(0.1, torch.zeros(2, 4)), "row 1: .* too far from the reference"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_sets_that_are_empty(name):
    constraint, reason = IMPOSSIBLE[name]
    problem = Problem(S, NegEntropy(), constraints=(constraint,))
    with pytest.raises(ValueError, match=reason):
        solve(problem)
    with pytest.raises(ValueError, match=reason):
        certify(problem, torch.full((2, 4), 0.25))
    q, status = solve(problem, validate=False)
    bad = torch.tensor([str(i) in reason.split(":")[0] for i in range(2)])
    assert status.tolist() == torch.where(bad, Status.INFEASIBLE, Status.OK).tolist()
    assert not bool(q[bad].any())
    torch.testing.assert_close(q[~bad].sum(-1), torch.ones(int((~bad).sum())))


def test_sets_that_do_not_meet():
    # half of the mass on one token, and the entropy of three
    both = (GroupBounds([[0]], lower=0.9), EntropyFloor(0.8))
    problem = Problem(torch.zeros(2, 3), NegEntropy(), constraints=both)
    with pytest.raises(ValueError, match=r"rows 0, 1: .*not all together"):
        solve(problem)
    q, status = solve(problem, validate=False)
    assert status.tolist() == [Status.INFEASIBLE] * 2
    assert not bool(q.any())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Caps(0.0), r"\(0, 1\], got 0"),
        (lambda: Caps(1.5), r"\(0, 1\], got 1.5"),
        (lambda: EntropyFloor(-1.0), ">= 0, got -1"),
        (lambda: KLBall(float("nan"), torch.zeros(3)), "got nan"),
        (lambda: KLBall(0.1, [0.0, 0.0]), "tensor"),
        (lambda: GroupBounds([[0, 1], [1]]), "must not overlap, but token 1"),
        (lambda: GroupBounds([[0, -1]]), "token ids >= 0"),
        (lambda: GroupBounds(torch.tensor([0.0, 1.0])), "whole numbers"),
        (lambda: GroupBounds([[0]], lower=[0.1, 0.2]), "one for each of 1 groups"),
        (lambda: GroupBounds([[0]], upper=1.2), r"in \[0, 1\]"),
        (lambda: GroupNorm([[0, 1], [1]]), "must not overlap"),
        (lambda: Problem(torch.zeros(3), Zero(), constraints=(Caps(0.5), Caps(0.6))), "at most one Caps"),
        (
            lambda: Problem(torch.zeros(3), Zero(), constraints=(EntropyFloor(0.5), KLBall(0.6, torch.zeros(3)))),
            "at most one EntropyFloor or KLBall",
        ),
        (lambda: Problem(torch.zeros(3), Zero(), constraints=("cap",)), "a constraint is"),
        (lambda: decoder({"decoder": "bounded", "groups": [[0, 1], [1]]}), "must not overlap"),
        (lambda: decoder("capped:cap=0"), r"in \(0, 1\]"),
    ],
)
def test_bad_parameters_are_refused_where_they_are_given(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (GroupBounds([[0, 9]]), r"in \[0, 4\), got 9"),
        (GroupBounds(torch.zeros(5, dtype=torch.int64)), "5 tokens, the scores have 4"),
        (GroupBounds([[0], [1]], 0.5, [0.4, 0.6]), "lower <= upper must hold .* group 0"),
        (GroupBounds([[0], [1]], torch.zeros(3)), "one per group"),
        (Caps(torch.tensor([0.5, 1.5])), r"in \[0, 1\]"),
        (Caps(torch.rand(3)), "one value per row"),
        (EntropyFloor(torch.tensor([0.5, -0.5])), ">= 0 in every row"),
        (KLBall(torch.tensor([0.5, -0.5]), torch.zeros(4)), ">= 0 in every row"),
        (KLBall(0.5, torch.zeros(3)), "log_reference must be"),
    ],
)
def test_parameters_that_do_not_fit_the_scores_are_refused(constraint, reason):
    with pytest.raises(ValueError, match=reason):
        solve(Problem(torch.zeros(2, 4), NegEntropy(), constraints=(constraint,)))


# decoders


@pytest.mark.parametrize("spec", ["capped:cap=0.3", "entropy-floor:h=2.5", "kl-ball:epsilon=0.3"])
def test_decoders_by_name(spec):
    s = 4 * torch.randn(4, 60, generator=torch.Generator().manual_seed(2)).double()
    d = decoder(spec)
    assert str(d) == spec
    q = d.distribution(s)
    assert bool(d.certify(s).holds(1e-9).all())
    assert bool((d.describe(s).gap < 1e-9).all())
    name = spec.split(":")[0]
    if name == "capped":
        assert q.amax().item() == pytest.approx(0.3, abs=1e-12)
    if name == "entropy-floor":
        assert bool((entropy(q) > 2.5 - 1e-9).all())
        assert bool((entropy(torch.softmax(s, -1)) < 2.5).any())
    if name == "kl-ball":
        used = torch.xlogy(q, q / torch.softmax(s, -1)).sum(-1)
        assert bool((used < 0.3 + 1e-9).all())
        assert bool((used > 0.3 - 1e-9).any())


def test_parameters_of_decoders_per_row():
    s = 4 * torch.randn(3, 60).double()
    for name, values in {
        "capped": {"cap": [0.1, 0.5, 1.0], "temperature": [1.0, 0.5, 2.0]},
        "entropy-floor": {"h": [0.0, 1.0, 4.0]},
        "kl-ball": {"epsilon": [0.0, 0.1, 9.0]},
        "group-sparse": {"weight": [0.0, 1.0, 4.0]},
    }.items():
        groups = {"groups": [[0, 1], [5, 6, 7]]} if name == "group-sparse" else {}
        together = decoder({"decoder": name, **values, **groups}).distribution(s)
        for i in range(3):
            alone = decoder({"decoder": name, **{k: v[i] for k, v in values.items()}, **groups})
            torch.testing.assert_close(together[i], alone.distribution(s[i]), atol=1e-9, rtol=0)


def test_groups_from_json():
    s = torch.randn(2, 8).double()
    data = {"decoder": "bounded", "groups": [[0, 1], [5, 6, 7]], "lower": [0.4, 0.0], "upper": [1.0, 0.1]}
    d = decoder(data)
    assert decoder(d.to_json()) == d
    q = d.distribution(s)
    assert bool((q[:, :2].sum(-1) >= 0.4 - 1e-12).all())
    assert bool((q[:, 5:].sum(-1) <= 0.1 + 1e-12).all())
    assert bool(d.certify(s).holds(1e-9).all())
    with pytest.raises(ValueError, match="list"):
        decoder("bounded:groups=abc")
    sparse = decoder({"decoder": "group-sparse", "groups": [[0, 1], [5, 6, 7]], "weight": 2.0})
    assert bool(sparse.certify(s).holds(1e-9).all())
    assert not torch.allclose(sparse.distribution(s), torch.softmax(s, -1), atol=1e-3)


def test_a_reference_of_another_model():
    s, t = torch.randn(2, 2, 30).double()
    q = decoder("kl-ball:epsilon=0.2").distribution(s, Context(other=t))
    torch.testing.assert_close(torch.xlogy(q, q / torch.softmax(t, -1)).sum(-1), exactly(0.2, 0.2))


def test_a_reference_of_another_model_under_a_mask():
    # all that the mask leaves has a mass of 1e-6 under the other model: far from r, and r is restricted too
    s, t = torch.randn(2, 2, 30).double()
    t[:, 20:] -= 14
    mask = torch.arange(30) >= 20
    d = decoder("kl-ball:epsilon=0.2")
    q = d.distribution(s, Context(other=t, mask=mask))
    r = torch.softmax(t[:, 20:], -1)
    torch.testing.assert_close(torch.xlogy(q[:, 20:], q[:, 20:] / r).sum(-1), exactly(0.2, 0.2))
    assert bool((q[:, :20] == 0).all())
    assert bool(d.certify(s, Context(other=t, mask=mask)).holds(1e-9).all())


# what must not be ignored


def test_fused_draws_decline():
    s = torch.randn(2, 5000)
    for constraint in (Caps(0.01), GroupBounds([[0]], 0.5), EntropyFloor(8.0), KLBall(0.1, s)):
        for support in (sx.Everything(), TopK(4000), sx.TopP(0.99)):
            plain = Problem(s, NegEntropy(), support=support)
            bound = replace(plain, constraints=(constraint,))
            u = torch.tensor([0.3, 0.6])
            assert draw_fused(plain, None, block_maxima(s), ByNumber(u)) is not None
            assert draw_fused(bound, None, block_maxima(s), ByNumber(u)) is None
            assert plan_for(plain, None) is not None
            assert plan_for(bound, None) is None


@pytest.mark.parametrize("omega", [NegEntropy(), HalfSquare(), Zero()])
def test_columns_that_a_constraint_needs_are_not_cut_away(omega):
    # sparse solutions and nuclei are solved on the few best columns; here the worst one must get half
    s = torch.linspace(50, 0, 2000).repeat(2, 1)
    q = solve(Problem(s, omega, constraints=(GroupBounds([[1999]], 0.5),)))
    torch.testing.assert_close(q[:, 1999], torch.tensor([0.5, 0.5]))
    q = solve(Problem(s, omega, support=TopK(100), constraints=(Caps(0.01),)))
    torch.testing.assert_close(q[:, :100], torch.full((2, 100), 0.01), atol=1e-6, rtol=0)


def test_draws_follow_q():
    # with 1,100 tokens a plain softmax would be drawn by a fused kernel
    s = torch.zeros(1500, 1100)
    s[:, 7] = 20.0
    tokens = decoder("capped:cap=0.25").sample(s, seeds=torch.arange(1500))
    assert (tokens == 7).float().mean().item() == pytest.approx(0.25, abs=0.05)


def test_a_target_beside_a_constraint():
    s = 3 * torch.randn(3, 40).double()
    q = decoder("capped:cap=0.4,entropy=2.0").distribution(s)
    torch.testing.assert_close(entropy(q), torch.full((3,), 2.0).double(), atol=1e-6, rtol=0)
    assert q.amax() <= 0.4 + 1e-12
    with pytest.raises(ValueError, match="target cannot be reached"):
        decoder("entropy-floor:h=2.5,entropy=2.0").distribution(s)


@pytest.mark.parametrize(
    "omega",
    [NegEntropy(), HalfSquare(), Zero(), NegEntropy() + GroupNorm(GROUPS)],
    ids=["entropy", "square", "zero", "group norm"],
)
def test_nothing_is_read_on_the_host(omega):
    rows = Rows(4, 1)
    lower, upper = rows.bounds()
    sets = [
        (Caps(rows.caps()),),
        (GroupBounds(INDEX, lower, upper), Caps(0.45)),
        (EntropyFloor(rows.floors()),),
        (KLBall(rows.radii(), rows.reference.log()),),
    ]
    for constraints in sets:
        if isinstance(omega, HalfSquare) and isinstance(constraints[0], KLBall):
            continue  # as with an entropy floor: a root in a root, all sweeps of both
        problem = Problem(rows.scores, omega, lam=rows.lam, constraints=constraints)
        chosen = MirrorAscent(max_steps=2) if isinstance(omega, sx.regularisers.Sum) else None
        with NoReads():
            q, status = solve(problem, chosen, validate=False)
        assert bool((status == 0).all())
        if chosen is None:
            torch.testing.assert_close(q, solve(problem), atol=1e-9, rtol=0)


def test_the_unconstrained_path_does_not_ask_for_constraints(monkeypatch):
    def asked(*_):
        raise AssertionError("constraints were looked at")

    for module in (sx.constraints, sx.problem, sx.solvers, sx.solvers.constrained):
        for name in ("bounds_of", "ball_of", "unmet", "as_constraints"):
            monkeypatch.setattr(module, name, asked, raising=False)
    s = torch.randn(2, 700)
    for spec in ("softmax", "top-p", "sparsemax", "bok", "bok:solver=exact"):
        decoder(spec).sample(s)
        decoder(spec).distribution(s, validate=False)
    with pytest.raises(AssertionError, match="looked at"):
        decoder("capped").sample(s)


def test_projections_onto_the_set():
    point = exactly(0.9, 0.3, -0.2, 0.1)
    torch.testing.assert_close(solve(Problem(point, HalfSquare(), constraints=(Caps(1.0),))), project_to_simplex(point))


def test_best_of_k_within_constraints():
    rows = Rows(3, 7)
    omega = KL(rows.reference.log()) + 0.3 * Coverage(4, 1.0)
    problem = Problem(rows.scores, omega, constraints=(Caps(0.4), GroupBounds(GROUPS, 0.1, 0.5)))
    assert bool(certify(problem, solve(problem, "dual-root")).holds(1e-8).all())


# float32 over a whole vocabulary


V = 151_936


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["caps", "groups", "groups and caps", "entropy", "KL", "filled"])
def test_a_whole_vocabulary(kind, dtype):
    g = torch.Generator().manual_seed(3)
    s = torch.randn(3, V, generator=g) * 2.5 - 20
    s[:2, :200] += torch.linspace(45, 10, 200)
    s[0, 1000:2000] = -INF
    s = s.to(dtype)
    index = torch.arange(V) % 50 - 1
    constraints = {
        "caps": (Caps(torch.tensor([0.1, 0.02, 1e-4])),),
        "groups": (GroupBounds(index, 0.01, 0.1),),
        "groups and caps": (GroupBounds(index, 0.01, 0.1), Caps(0.05)),
        "entropy": (EntropyFloor(torch.tensor([2.0, 5.0, 11.0])),),
        "KL": (KLBall(torch.tensor([0.01, 0.1, 1.0]), s.float()),),
        "filled": (Caps(torch.tensor([0.1, 0.02, 1e-4])),),
    }[kind]
    problem = Problem(s, Zero() if kind in ("KL", "filled") else NegEntropy(), constraints=constraints)
    q = solve(problem)
    assert q.dtype == torch.float32
    if isinstance(constraints[0], Caps):
        assert bool((q <= constraints[0].on(q)).all())
    certificate = certify(problem, q)
    assert bool((certificate.gap < 1e-4).all()), certificate
    assert bool((certificate.mass_error < 1e-6).all()), certificate
    assert bool((certificate.violation < 1e-5).all()), certificate
