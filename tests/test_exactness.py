"""Decoders and solvers in float64 against references written as plain Python loops, one token at a time."""

import itertools
import math
from math import exp, inf, log

import pytest
import torch
from torch import Tensor

from simplexity import (
    KL,
    Allowed,
    ClosedForm,
    Context,
    Coverage,
    DualRoot,
    Everything,
    HalfSquare,
    MirrorAscent,
    NegEntropy,
    Problem,
    TopK,
    TopP,
    Tsallis,
    Zero,
    certify,
    decoder,
    decoders,
    solve,
)

KINDS = ["plain", "ties", "forbidden"]
DTYPE = torch.float64


def rows(kind: str, count: int, size: int, seed: int = 0) -> Tensor:
    """Random scores; "ties" have few distinct values, "forbidden" have −inf in about a third of the places."""
    rng = torch.Generator().manual_seed(seed + 1000 * size)
    s = 2 * torch.randn(count, size, generator=rng, dtype=DTYPE)
    if kind == "ties":
        return s.round()
    if kind == "forbidden":
        closed = torch.rand(count, size, generator=rng) < 0.35
        closed[:, size // 2] = False  # every row keeps a token
        return s.masked_fill(closed, -inf)
    return s


def column(values: list) -> Tensor:
    """One value per row: whole numbers stay whole, others become float64 (a list alone would give float32)."""
    return torch.tensor(values, dtype=DTYPE if isinstance(values[0], float) else torch.int64)


def agree(q: Tensor, expected: list, tolerance: float = 1e-8) -> None:
    assert q.dtype == DTYPE
    torch.testing.assert_close(q, torch.tensor(expected, dtype=DTYPE), rtol=0, atol=tolerance)


# The references. `s` is a list of numbers, −inf where a token is forbidden.


def best_first(s: list[float]) -> list[int]:
    return sorted((v for v in range(len(s)) if s[v] > -inf), key=lambda v: (-s[v], v))


def greedy(s):
    return [1.0 if v == best_first(s)[0] else 0.0 for v in range(len(s))]


def softmax(s, temperature=1.0, kept=None):
    kept = best_first(s) if kept is None else kept
    top = max(s[v] for v in kept)
    mass = [exp((s[v] - top) / temperature) if v in kept else 0.0 for v in range(len(s))]
    return [m / math.fsum(mass) for m in mass]


def top_k(s, k, temperature):
    return softmax(s, temperature, best_first(s)[:k])


def nucleus(s, p, temperature):
    probs, kept = softmax(s, temperature), []
    for v in best_first(s):
        kept.append(v)
        if p < 1 and math.fsum(probs[u] for u in kept) >= p:
            break
    return kept


def top_p(s, p, temperature):
    return softmax(s, temperature, nucleus(s, p, temperature))


def top_p_temperature_last(s, p, temperature):
    return softmax(s, temperature, nucleus(s, p, 1.0))


def sparsemax(s, lam):
    if lam == 0:
        return greedy(s)
    best, eta = sorted(s, reverse=True), inf
    for k in range(1, len(s) + 1):
        candidate = (math.fsum(best[:k]) - lam) / k
        if best[k - 1] > candidate:
            eta = candidate
    return [max(x - eta, 0.0) / lam for x in s]


def bisect(f, low, high):
    """The root of an increasing f to 13 digits; an end of the bracket where the root lies outside."""
    while high - low > 1e-13 * (1 + abs(low)):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < 0 else (low, middle)
    return high


def entmax(s, lam, alpha):
    if lam == 0:
        return greedy(s)
    if alpha == 1:
        return softmax(s, lam)

    def at(eta):
        return [max((alpha - 1) * (x - eta) / lam, 0.0) ** (1 / (alpha - 1)) for x in s]

    return at(bisect(lambda eta: 1 - math.fsum(at(eta)), max(s) - lam / (alpha - 1), max(s)))


def anchored(s, r, lam):
    """∝ r·exp(s/λ)."""
    if lam == 0:
        return greedy([x if m > 0 else -inf for x, m in zip(s, r, strict=True)])
    return softmax([x / lam + log(m) if m > 0 else -inf for x, m in zip(s, r, strict=True)])


def separable(s, lam, slope):
    """max <q, s> − λ·Σ φ_v(q_v) by nested bisection, given slope(v, q) = φ_v'(q), increasing in q.

    Inside, the q of one token at a multiplier η (in log q, for its relative precision); outside, η.
    """

    def at(v, eta):
        x = (s[v] - eta) / lam
        if s[v] == -inf or slope(v, 0.0) >= x:
            return 0.0
        return exp(bisect(lambda y: slope(v, exp(y)) - x, -740.0, 0.0))

    eta = bisect(lambda eta: 1 - math.fsum(at(v, eta) for v in range(len(s))), -1e3, 1e3)
    return [at(v, eta) for v in range(len(s))]


def ln(x):
    return log(x) if x > 0 else -inf


def weigh(s, p, weights, m):
    """What covering a token is worth. Rank weights halve every m ranks and end after 32 halvings."""
    rank = {v: i for i, v in enumerate(best_first(s))}
    return {
        "probs": p,
        "uniform": [1.0] * len(s),
        "top-m": [1.0 if rank.get(v, m) < m else 0.0 for v in range(len(s))],
        "rank": [2 ** (-rank[v] / m) if rank.get(v, inf) < 32 * m else 0.0 for v in range(len(s))],
    }[weights]


def reward(s, p, scores):
    return {"logits": s, "logprobs": [ln(x) for x in p], "none": [0.0 if x > -inf else -inf for x in s]}[scores]


def best_of_k(s, k, beta, lam, temperature=1.0, weights="probs", m=8, scores="logits"):
    if lam == 0:
        return greedy(s)
    p = softmax(s, temperature)
    w = weigh(s, p, weights, m)
    return separable(
        reward(s, p, scores), lam, lambda v, q: ln(q) + 1 - ln(p[v]) - beta * w[v] * k * (1 - q) ** (k - 1)
    )


def algorithm_1(s, p, w, k, beta, lam, step, steps):
    """Best-of-K by mirror ascent, line by line; a token with no mass never gets any."""
    q = list(p)
    for _ in range(steps):
        g = [
            s[i] - lam * (log(q[i]) - log(p[i]) + 1) + lam * beta * w[i] * k * (1 - q[i]) ** (k - 1)
            if q[i] > 0
            else -inf
            for i in range(len(s))
        ]
        top = max(step * x for x in g)
        q = [q[i] * exp(step * g[i] - top) for i in range(len(s))]
        norm = math.fsum(q)
        q = [x / norm for x in q]
    return q


def default_step(k, beta, lam, w):
    """1, or the inverse of the curvature relative to the entropy if that is smaller."""
    kappa = 0.0 if k == 1 else 2.0 if k == 2 else k * ((k - 2) / (k - 1)) ** (k - 2)
    return min(1.0, 1 / (lam + lam * beta * max(w) * kappa)) if lam > 0 else 1.0


def mirror_best_of_k(s, k, beta, lam, temperature=1.0, step=None, steps=5, weights="probs", m=8, scores="logits"):
    p = softmax(s, temperature)
    w = weigh(s, p, weights, m)
    step = default_step(k, beta, lam, w) if step is None else step
    return algorithm_1(reward(s, p, scores), p, w, k, beta, lam, step, steps)


def check(name: str, s: Tensor, reference, fixed: dict | None = None, tolerance: float = 1e-8, **columns: list) -> list:
    """The named decoder against the reference: parameters per row for the batch, and as numbers row by row."""
    fixed = fixed or {}
    settings = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    settings = settings or [{}] * len(s)
    expected = [reference(row, **setting) for row, setting in zip(s.tolist(), settings, strict=True)]

    batched = decoders()[name](**fixed, **{key: column(values) for key, values in columns.items()})
    agree(batched.distribution(s), expected, tolerance)
    blind, status = batched.distribution(s, validate=False)
    agree(blind, expected, tolerance)
    assert not status.any()
    for row, setting, answer in zip(s, settings, expected, strict=True):
        agree(decoder({"decoder": name, **fixed, **setting}).distribution(row), answer, tolerance)
    return expected


# The decoders


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 5, 40])
def test_greedy(kind, size):
    s = rows(kind, 20, size)
    expected = check("greedy", s, greedy, tolerance=0.0)
    agree(solve(Problem(s, HalfSquare(), lam=0.0)), expected, 0.0)
    agree(solve(Problem(s, Zero(), lam=3.0)), expected, 0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 5, 40])
def test_softmax(kind, size):
    s, temperature = rows(kind, 6, size), [0.05, 0.5, 1.0, 1.3, 3.0, 50.0]
    expected = check("softmax", s, softmax, temperature=temperature)
    for solver in ("closed-form", "dual-root"):
        agree(solve(Problem(s, NegEntropy(), lam=column(temperature)), solver), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [5, 17, 40])
def test_top_k(kind, size):
    s, k, temperature = rows(kind, 7, size), [1, 2, 3, 5, 10, 40, 100], [0.3, 1.0, 2.0, 0.7, 1.0, 1.0, 5.0]
    expected = check("top-k", s, top_k, k=k, temperature=temperature)
    q = solve(Problem(s, NegEntropy(), lam=column(temperature), support=TopK(column(k))), "dual-root")
    agree(q, expected)
    assert torch.equal(q > 0, torch.tensor(expected, dtype=DTYPE) > 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [5, 17, 40])
@pytest.mark.parametrize("last", [False, True])
def test_top_p_with_the_temperature_before_or_after_the_cut(kind, size, last):
    s = rows(kind, 8, size)
    p, temperature = [0.01, 0.3, 0.5, 0.7, 0.9, 0.95, 0.999, 1.0], [1.0, 0.5, 3.0, 0.7, 2.0, 1.0, 0.8, 1.5]
    reference = top_p_temperature_last if last else top_p
    expected = check("top-p", s, reference, {"temperature_last": last}, p=p, temperature=temperature)
    cut = TopP(column(p), 1.0 if last else column(temperature))
    q = solve(Problem(s, NegEntropy(), lam=column(temperature), support=cut), "dual-root")
    agree(q, expected)
    assert torch.equal(q > 0, torch.tensor(expected, dtype=DTYPE) > 0)


def test_the_order_of_temperature_and_cut_matters():
    s = rows("plain", 20, 20)
    first, last = (
        decoder(f"top-p:p=0.8,temperature=3,temperature_last={x}").distribution(s) for x in ("false", "true")
    )
    assert bool(((first > 0).sum(-1) > (last > 0).sum(-1)).all())


def test_a_nucleus_that_is_reached_exactly_takes_no_further_token():
    s = torch.zeros(4, dtype=DTYPE)
    agree(decoder("top-p:p=0.5").distribution(s), [0.5, 0.5, 0.0, 0.0], 0.0)
    agree(decoder("top-p:p=0.5").distribution(s, validate=False)[0], [0.5, 0.5, 0.0, 0.0], 0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [5, 40, 200])
def test_top_p_on_flat_rows(kind, size):
    # nuclei of most of the vocabulary, and of all of it
    s = rows(kind, 6, size) / 10
    check("top-p", s, top_p, p=[1.0, 0.5, 0.9, 0.999, 1.0, 1.0], temperature=[1.0, 0.7, 2.0, 1.0, 0.5, 3.0])
    check("top-p", s[:1], top_p, p=[1.0], temperature=[1.0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 5, 40])
def test_sparsemax(kind, size):
    s, lam = rows(kind, 8, size), [0.0, 1e-3, 0.1, 0.5, 1.0, 2.0, 8.0, 100.0]
    expected = check("sparsemax", s, sparsemax, lam=lam)
    agree(solve(Problem(s, HalfSquare(), lam=column(lam)), "dual-root"), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 5, 40])
@pytest.mark.parametrize("alpha", [1.0, 1.02, 1.25, 1.5, 1.9, 2.0, 3.0])
def test_entmax(kind, size, alpha):
    s, lam = rows(kind, 7, size), [0.0, 1e-2, 0.3, 0.5, 1.0, 3.0, 30.0]
    expected = check("entmax", s, lambda s, lam: entmax(s, lam, alpha), {"alpha": alpha}, lam=lam)
    if alpha > 1:
        agree(solve(Problem(s, Tsallis(alpha), lam=column(lam)), "dual-root"), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_entmax_with_an_alpha_for_each_row(kind):
    s, alpha, lam = rows(kind, 6, 20), [1.1, 1.3, 1.5, 2.0, 2.5, 4.0], [1.0, 0.2, 2.0, 1.0, 0.5, 3.0]
    check("entmax", s, entmax, alpha=alpha, lam=lam)


def test_entmax_with_alpha_one_in_some_rows():
    # alpha = 1 is accepted as a number and means softmax; a row of a batch must mean the same
    check("entmax", rows("plain", 3, 8), entmax, alpha=[1.0, 1.5, 2.0], lam=[1.0, 1.0, 1.0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_entmax_is_certified_with_alpha_one_in_some_rows(dtype):
    d, s = decoder({"decoder": "entmax", "alpha": [1.0, 1.0, 1.000001, 1.5]}), rows("plain", 4, 40).to(dtype)
    assert d.certify(s).gap.max() < (1e-9 if dtype == DTYPE else 1e-4)
    q, status = d.distribution(s, validate=False)
    assert (status == 0).all()
    torch.testing.assert_close(q, d.distribution(s))


def test_the_slope_of_tsallis_is_finite_at_zero_and_loses_no_digits_near_alpha_one():
    torch.testing.assert_close(Tsallis(1.5).grad(torch.tensor([0.0, 1.0])), torch.tensor([-4 / 3, 2 / 3]))
    slope = Tsallis(1 + 1e-10).grad(torch.tensor([0.25], dtype=DTYPE))
    torch.testing.assert_close(slope, torch.tensor([1 + log(0.25)], dtype=DTYPE), rtol=0, atol=1e-9)


@pytest.mark.parametrize("alpha", [2.5, 4.0, 10.0, 50.0])
def test_entmax_is_certified_where_the_slope_is_flat_at_zero(alpha):
    # there q is a root of what is left of η's last digits
    s = torch.cat([rows("plain", 50, 5) / 4, torch.tensor([[0.0, -0.333333, -inf, -inf, -inf]], dtype=DTYPE)])
    d = decoder(f"entmax:alpha={alpha}")
    assert d.certify(s).holds(1e-12).all()
    assert certify(d.problem(s), d.distribution(s, validate=False)[0]).holds(1e-12).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 5, 40])
def test_kl_to_the_model_itself(kind, size):
    s, lam, temperature = rows(kind, 5, size), [0.0, 0.1, 1.0, 0.5, 20.0], [1.0, 0.5, 2.0, 1.0, 0.3]
    check(
        "kl", s, lambda s, lam, temperature: anchored(s, softmax(s, temperature), lam), lam=lam, temperature=temperature
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other_kind", KINDS)
@pytest.mark.parametrize("size", [5, 40])
def test_kl_to_another_model(kind, other_kind, size):
    s, other, lam = rows(kind, 5, size), rows(other_kind, 5, size, seed=7), [0.0, 0.1, 1.0, 0.5, 20.0]
    reference = [softmax(row, 0.7) for row in other.tolist()]
    expected = [anchored(a, r, x) for a, r, x in zip(s.tolist(), reference, lam, strict=True)]

    kl = decoders()["kl"](lam=column(lam), temperature=0.7)
    agree(kl.distribution(s, Context(other=other)), expected)
    problem = Problem(s, KL.to(torch.tensor(reference, dtype=DTYPE)), lam=column(lam))
    for solver in ("closed-form", "dual-root"):
        agree(solve(problem, solver), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", ["probs", "top-m", "rank", "uniform"])
@pytest.mark.parametrize("scores", ["logits", "logprobs", "none"])
def test_best_of_k_exact(kind, weights, scores):
    fixed = {"solver": "exact", "weights": weights, "scores": scores, "m": 3}
    check(
        "bok",
        rows(kind, 7, 6),
        lambda s, **setting: best_of_k(s, weights=weights, scores=scores, m=3, **setting),
        fixed,
        k=[2, 3, 8, 64, 5, 16, 2],
        beta=[0.01, 0.5, 0.01, 10.0, 3.0, 0.0, 100.0],
        lam=[0.1, 1.0, 0.5, 0.2, 5.0, 1.0, 0.05],
        temperature=[1.0, 0.7, 1.5, 1.0, 0.9, 2.0, 1.0],
    )


@pytest.mark.parametrize("weights", ["probs", "top-m", "uniform"])
def test_best_of_one_is_linear_in_its_reward(weights):
    # with one draw, coverage is Σ w·q: a bonus of λβw on the scores
    def reference(s, k, beta, lam):
        p = softmax(s)
        w = weigh(s, p, weights, 2)
        return anchored([x + lam * beta * bonus for x, bonus in zip(s, w, strict=True)], p, lam)

    fixed = {"solver": "exact", "weights": weights, "m": 2}
    check(
        "bok",
        rows("plain", 4, 9),
        reference,
        fixed,
        k=[1, 1, 1, 1],
        beta=[0.1, 1.0, 5.0, 50.0],
        lam=[0.1, 1.0, 3.0, 0.3],
    )


def test_best_of_k_with_one_in_some_rows():
    fixed = {"solver": "exact"}
    check(
        "bok",
        rows("plain", 4, 9),
        best_of_k,
        fixed,
        k=[1, 8, 1, 2],
        beta=[5.0, 5.0, 50.0, 1.0],
        lam=[1.0, 1.0, 0.1, 0.1],
    )


@pytest.mark.parametrize(("k", "beta"), [(8, 1e3), (64, 4e3), (1000, 2e2)])
def test_best_of_k_with_very_strong_coverage(k, beta):
    s = rows("plain", 6, 30)
    for weights in ("uniform", "top-m"):
        bok = decoder(f"bok:k={k},beta={beta},lam=0.1,weights={weights},solver=exact")
        assert bool(bok.certify(s).holds(1e-9).all())


def test_best_of_k_without_anchor_is_greedy_at_the_optimum():
    fixed = {"solver": "exact"}
    check("bok", rows("ties", 3, 9), best_of_k, fixed, k=[2, 8, 8], beta=[0.5, 0.5, 0.5], lam=[0.0, 0.0, 1.0])


def test_best_of_k_with_weights_of_ones_own():
    s = rows("plain", 4, 8)
    w = torch.rand(4, 8, dtype=DTYPE, generator=torch.Generator().manual_seed(3)) * 4

    def optimum(s, w):
        p = softmax(s)
        return separable(s, 0.5, lambda v, q: ln(q) + 1 - ln(p[v]) - 0.8 * w[v] * 6 * (1 - q) ** 5)

    bok = decoders()["bok"](k=6, beta=0.8, lam=0.5, weights=lambda scores: w, solver="exact")
    agree(bok.distribution(s), [optimum(*pair) for pair in zip(s.tolist(), w.tolist(), strict=True)])


# Shapes


@pytest.mark.parametrize(
    "spec",
    [
        "greedy",
        "softmax:temperature=0.7",
        "top-k:k=3",
        "top-p:p=0.8",
        "sparsemax",
        "entmax",
        "kl",
        "bok",
        "bok:solver=exact",
    ],
)
def test_a_batch_of_any_shape_is_its_rows(spec):
    s = rows("plain", 24, 11).reshape(2, 3, 4, 11)
    q = decoder(spec).distribution(s)
    assert q.shape == s.shape
    for index in itertools.product(range(2), range(3), range(4)):
        torch.testing.assert_close(q[index], decoder(spec).distribution(s[index]), rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 1), (1, 3), ()])
def test_parameters_per_row_follow_the_batch(shape):
    s = rows("plain", 6, 11).reshape(2, 3, 11)
    lam = torch.rand(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(1)) + 0.1
    each = (lam.squeeze(-1) if lam.ndim == 3 else lam).expand(2, 3)
    q = solve(Problem(s, HalfSquare(), lam=lam))
    agree(q, [[sparsemax(s[i, j].tolist(), each[i, j].item()) for j in range(3)] for i in range(2)])


# Longer rows, where the solvers look at a few columns only


def test_long_rows():
    s = rows("plain", 3, 700)
    check("sparsemax", s, sparsemax, lam=[0.3, 1.0, 5.0])
    check("entmax", s, entmax, alpha=[1.5, 1.2, 2.5], lam=[0.3, 1.0, 5.0])
    check("top-p", s, top_p, p=[0.3, 0.8, 0.99], temperature=[1.0, 0.5, 2.0])
    check("top-k", s, top_k, k=[3, 30, 300], temperature=[1.0, 0.5, 2.0])
    check("greedy", s, greedy)


def test_long_rows_of_best_of_k():
    s = rows("plain", 1, 200)
    check("bok", s, best_of_k, {"solver": "exact"}, k=[8], beta=[2.0], lam=[0.4])


def test_long_rows_with_lam_zero_in_some_of_them():
    check("sparsemax", rows("plain", 3, 700), sparsemax, lam=[0.0, 1.0, 0.0])
    check("entmax", rows("plain", 3, 700), lambda s, lam: entmax(s, lam, 1.25), {"alpha": 1.25}, lam=[1.0, 0.0, 0.0])


# One problem, several solvers


SUPPORTS = {
    "everything": Everything(),
    "top-k": TopK(4),
    "top-p": TopP(0.8),
    "allowed": Allowed([1, 2, 3, 5, 7]),
}
FIXED = MirrorAscent(steps=1000)
EUCLIDEAN = MirrorAscent(steps=300, geometry="euclidean")


def reference_and_weights(size: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(5)
    r = torch.softmax(torch.randn(size, generator=rng, dtype=DTYPE), -1)
    return r, 3 * torch.rand(size, generator=rng, dtype=DTYPE)


R, W = reference_and_weights(8)
SOLVABLE = {
    "negative entropy": (NegEntropy(), [ClosedForm(), DualRoot(), FIXED]),
    "KL": (KL.to(R), [ClosedForm(), DualRoot(), FIXED]),
    "half square": (HalfSquare(), [ClosedForm(), DualRoot(), EUCLIDEAN]),
    "Tsallis 2": (Tsallis(2.0), [ClosedForm(), DualRoot(), EUCLIDEAN]),
    "Tsallis 1.5": (Tsallis(1.5), [ClosedForm(), DualRoot(), FIXED]),
    "Tsallis 1.2": (Tsallis(1.2), [DualRoot(), FIXED]),
    "Tsallis 2.5": (Tsallis(2.5), [DualRoot(), EUCLIDEAN]),
    "best of 2": (KL.to(R) + 0.5 * Coverage(2, W), [DualRoot(), FIXED]),
    "best of 8": (KL.to(R) + 0.1 * Coverage(8, W), [DualRoot(), FIXED]),
    "best of 16, no anchor": (NegEntropy() + 0.3 * Coverage(16), [DualRoot(), FIXED]),
}


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("name", SOLVABLE)
def test_solvers_agree(name, support):
    omega, solvers = SOLVABLE[name]
    s = rows("plain", 8, 8, seed=2)  # no token at the very edge of its support, where mirror ascent is slow
    s[0, :3] = s[0, 3]  # a tie
    s[1, 4] = -inf
    lam = torch.linspace(0.3, 2.5, 8, dtype=DTYPE)
    problem = Problem(s, omega, lam=lam, support=SUPPORTS[support])
    first, *others = [solve(problem, solver) for solver in solvers]
    assert bool((first[~problem.mask()] == 0).all())
    for q in others:
        torch.testing.assert_close(q, first, rtol=0, atol=1e-8)
    assert bool(certify(problem, first).holds(1e-9).all())


@pytest.mark.parametrize("name", SOLVABLE)
def test_mirror_ascent_stops_at_its_tolerance(name):
    omega, (*_, mirror) = SOLVABLE[name]
    problem = Problem(rows("plain", 6, 8), omega, lam=1.5)
    q = solve(problem, MirrorAscent(geometry=mirror.geometry))
    assert bool(certify(problem, q).holds(1.001e-10).all())
    torch.testing.assert_close(q, solve(problem), rtol=0, atol=1e-6)


@pytest.mark.parametrize("support", [Everything(), TopK(3)], ids=["everything", "top-k"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("anchored_twice", [False, True])
def test_mirror_ascent_from_the_reference(support, batch, anchored_twice):
    # one reference for all rows; with a second anchor the start is still r, not the middle of the two
    s = rows("plain", batch, 8)
    omega = KL.to(R) + 0.5 * Coverage(4, W)
    problem = Problem(s, NegEntropy() + omega if anchored_twice else omega, lam=0.5, support=support)
    q = R * problem.mask()
    q = q / q.sum(-1, keepdim=True)
    for _ in range(3):
        q = torch.where(q > 0, q * torch.exp(0.4 * problem.gradient(q)), 0.0)
        q = q / q.sum(-1, keepdim=True)
    for start in ("reference", R, R.expand_as(s)):
        mirror = MirrorAscent(steps=3, step=0.4, start=start)
        torch.testing.assert_close(solve(problem, mirror), q, rtol=0, atol=1e-12)
        torch.testing.assert_close(solve(problem, mirror, validate=False)[0], q, rtol=0, atol=1e-12)


@pytest.mark.parametrize("geometry", ["entropic", "euclidean"])
def test_mirror_ascent_without_a_regulariser_reaches_the_vertex(geometry):
    s = rows("forbidden", 6, 12)
    q = solve(Problem(s, Zero()), MirrorAscent(geometry=geometry))
    agree(q, [greedy(row) for row in s.tolist()])


class Mixed:
    """The bare minimum of a regulariser: Σ q log q + ¼‖q‖², with no gradient."""

    def value(self, q: Tensor) -> Tensor:
        return (torch.xlogy(q, q) + 0.25 * q * q).sum(-1)


def test_a_regulariser_that_knows_its_value_only():
    s, lam = rows("forbidden", 3, 8), [0.4, 1.0, 3.0]
    expected = [separable(row, x, lambda v, q: ln(q) + 1 + 0.5 * q) for row, x in zip(s.tolist(), lam, strict=True)]
    problem = Problem(s, Mixed(), lam=column(lam))
    q = solve(problem)  # a warning here says that the default tolerance was not reached
    agree(q, expected)
    assert bool(certify(problem, q).holds(1.001e-10).all())


# Algorithm 1


SETTINGS = [
    {"k": 8, "beta": 0.01, "lam": 0.1},
    {"k": 8, "beta": 0.05, "lam": 0.5, "temperature": 0.9, "steps": 1},
    {"k": 2, "beta": 2.0, "lam": 0.3, "temperature": 0.5, "steps": 10, "step": 0.1},
    {"k": 16, "beta": 0.7, "lam": 1.2, "temperature": 1.7, "steps": 3, "step": 0.4},
    {"k": 3, "beta": 5.0, "lam": 2.0, "temperature": 1.0, "steps": 7},
    {"k": 1, "beta": 1.0, "lam": 0.2, "steps": 4},
    {"k": 64, "beta": 10.0, "lam": 0.05, "temperature": 1.3, "steps": 20},
    {"k": 5, "beta": 0.1, "lam": 0.9, "steps": 6, "step": 2.0},
    {"k": 5, "beta": 0.1, "lam": 0.9, "steps": 0},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("scores", ["logits", "logprobs", "none"])
@pytest.mark.parametrize("weights", ["probs", "top-m", "rank", "uniform"])
def test_best_of_k_is_algorithm_1(weights, scores, setting):
    fixed = {"weights": weights, "scores": scores, "m": 4}
    spec = "bok:" + ",".join(f"{key}={value}" for key, value in {**fixed, **setting}.items())
    for kind in KINDS:
        s = rows(kind, 2, 15)
        expected = [mirror_best_of_k(row, **fixed, **setting) for row in s.tolist()]
        agree(decoder(spec).distribution(s), expected, 1e-10)
        agree(decoder(spec).distribution(s, validate=False)[0], expected, 1e-10)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("weights", ["probs", "top-m", "rank", "uniform"])
def test_algorithm_1_on_long_rows(weights, setting):
    # most tokens of a long row are too unlikely to feel the coverage term, and may be treated apart
    fixed = {"weights": weights, "m": 4}
    spec = "bok:" + ",".join(f"{key}={value}" for key, value in {**fixed, **setting}.items())
    for kind, scale in itertools.product(KINDS, (0.3, 1.0, 4.0)):
        s = scale * rows(kind, 1, 300)
        expected = [mirror_best_of_k(row, **fixed, **setting) for row in s.tolist()]
        agree(decoder(spec).distribution(s), expected, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_algorithm_1_with_parameters_per_row(kind):
    setting = {
        "k": [2, 8, 16, 1, 4],
        "beta": [0.5, 0.01, 1.0, 0.3, 0.0],
        "lam": [0.1, 0.3, 2.0, 1.0, 0.7],
        "temperature": [1.0, 0.5, 2.0, 0.9, 1.1],
        "step": [1.0, 0.2, 0.1, 1.5, 0.5],
    }
    check("bok", rows(kind, 5, 15), mirror_best_of_k, tolerance=1e-10, **setting)


def test_algorithm_1_without_anchor():
    # λ = 0 leaves <q, s>: the J steps sharpen p, they do not jump to the optimum
    s = rows("plain", 3, 9) / 4
    expected = [softmax(row, 1 / (1 + 5)) for row in s.tolist()]
    agree(decoder("bok:lam=0").distribution(s), expected, 1e-10)
    check("bok", s, mirror_best_of_k, tolerance=1e-10, k=[8, 2, 8], beta=[0.01, 0.5, 0.5], lam=[0.0, 0.0, 1.0])


def test_rank_weights_end_after_32_halvings():
    s = rows("plain", 3, 40)
    fixed = {"weights": "rank", "m": 1, "scores": "none"}
    # so strong a reward that 2^-33 would show
    check(
        "bok",
        s,
        lambda s, **p: mirror_best_of_k(s, **fixed, **p),
        fixed,
        1e-10,
        k=[2] * 3,
        beta=[1e6] * 3,
        lam=[1e-5] * 3,
    )


@pytest.mark.parametrize("k", [2, 3, 8, 50])
@pytest.mark.parametrize("beta", [0.0, 0.3, 4.0])
@pytest.mark.parametrize("weights", ["probs", "uniform"])
def test_the_default_step(k, beta, weights):
    # some of these are safe with a step of 1, others need a smaller one
    lam = [0.05, 0.3, 0.9, 1.5, 6.0]
    s = rows("plain", 5, 10)
    fixed = {"weights": weights, "steps": 2}
    check("bok", s, lambda s, **p: mirror_best_of_k(s, **fixed, **p), fixed, 1e-10, k=[k] * 5, beta=[beta] * 5, lam=lam)


def test_the_default_step_is_smaller_only_where_it_must_be():
    for lam, step in ((0.3, 1.0), (3.0, 1 / (3 + 3 * 0.5 * 8 * (6 / 7) ** 6))):  # 0.3·(1 + 0.5·3.17) = 0.78
        bok = decoder(f"bok:k=8,beta=0.5,lam={lam},weights=uniform")
        problem = bok.problem(rows("plain", 1, 5))
        assert bok.method(problem)._step(problem) == pytest.approx(step, rel=1e-14)


@pytest.mark.parametrize("lam", [0.1, 0.5, 1.0, 1.9])
@pytest.mark.parametrize("step", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("steps", [0, 1, 5, 12])
def test_without_coverage_mirror_steps_are_a_temperature(lam, step, steps):
    s = rows("forbidden", 4, 12)
    for t in (0.7, 1.0, 1.4):
        sharpness = 1 / t + (1 - (1 - step * lam) ** steps) / lam
        expected = [softmax(row, 1 / sharpness) for row in s.tolist()]
        q = decoder(f"bok:beta=0,lam={lam},step={step},steps={steps},temperature={t}").distribution(s)
        agree(q, expected, 1e-12)


# Sums and multiples


def slopes(name: str, r: list[float], w: list[float]):
    """φ_v'(q), of each sum in SUMS."""
    half_entmax = {a: (lambda q, a=a: (q ** (a - 1) - 1 / a) / (a - 1)) for a in (1.5, 3.0)}
    return {
        "entropy + half square": lambda v, q: ln(q) + 1 + 0.5 * q,
        "KL + Tsallis": lambda v, q: ln(q) + 1 - log(r[v]) + half_entmax[1.5](q),
        "twice the entropy": lambda v, q: 2 * (ln(q) + 1),
        "entropy + KL": lambda v, q: ln(q) + 1 + 3 * (ln(q) + 1 - log(r[v])),
        "half square twice": lambda v, q: q + 0.25 * q,
        "Tsallis + Tsallis": lambda v, q: 0.3 * half_entmax[1.5](q) + 2 * half_entmax[3.0](q),
        "half the half square": lambda v, q: 0.5 * q,
        "three times Tsallis": lambda v, q: 3 * half_entmax[1.5](q),
        "Tsallis + coverage": lambda v, q: half_entmax[1.5](q) - 0.2 * w[v] * 4 * (1 - q) ** 3,
        "best of 4 + half square": lambda v, q: ln(q) + 1 - log(r[v]) - 0.2 * w[v] * 4 * (1 - q) ** 3 + 0.7 * q,
        "two coverages": lambda v, q: ln(q) + 1 - log(r[v]) - 0.2 * w[v] * 4 * (1 - q) ** 3 - 0.1 * 2 * (1 - q),
        "twice best of 4": lambda v, q: 2 * (ln(q) + 1 - log(r[v]) - 0.2 * w[v] * 4 * (1 - q) ** 3),
        "coverage alone": lambda v, q: -0.6 * 4 * (1 - q) ** 3,
        "entropy + zero": lambda v, q: ln(q) + 1,
        "entropy + nothing of a square": lambda v, q: ln(q) + 1,
    }[name]


SUMS = {
    "entropy + half square": NegEntropy() + 0.5 * HalfSquare(),
    "KL + Tsallis": KL.to(R) + Tsallis(1.5),
    "twice the entropy": 2 * NegEntropy(),
    "entropy + KL": NegEntropy() + 3 * KL.to(R),
    "half square twice": HalfSquare() + HalfSquare() * 0.25,
    "Tsallis + Tsallis": 0.3 * Tsallis(1.5) + 2 * Tsallis(3.0),
    "half the half square": 0.5 * HalfSquare(),
    "three times Tsallis": 3 * Tsallis(1.5),
    "Tsallis + coverage": Tsallis(1.5) + 0.2 * Coverage(4, W),
    "best of 4 + half square": KL.to(R) + 0.2 * Coverage(4, W) + 0.7 * HalfSquare(),
    "two coverages": KL.to(R) + 0.2 * Coverage(4, W) + 0.1 * Coverage(2),
    "twice best of 4": 2 * (KL.to(R) + 0.2 * Coverage(4, W)),
    "coverage alone": Coverage(4, 0.6),
    "entropy + zero": NegEntropy() + Zero(),
    "entropy + nothing of a square": NegEntropy() + 0 * HalfSquare(),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_and_multiples(name):
    s, lam = rows("plain", 2, 8), [0.3, 2.0]
    s[1, [0, 5]] = -inf
    slope = slopes(name, R.tolist(), W.tolist())
    expected = [separable(row, x, slope) for row, x in zip(s.tolist(), lam, strict=True)]
    problem = Problem(s, SUMS[name], lam=column(lam))
    agree(solve(problem), expected)
    agree(solve(problem, validate=False)[0], expected)
    assert bool(certify(problem, solve(problem)).holds(1e-9).all())


# sparse sums are left out: where a token's optimum is zero the entropic steps approach it slowly
DENSE = [n for n in SUMS if "ntropy" in n or "KL" in n or "best of" in n]


@pytest.mark.parametrize("name", DENSE)
def test_sums_by_mirror_ascent(name):
    problem = Problem(rows("plain", 3, 8), SUMS[name], lam=column([0.5, 1.0, 2.0]))
    torch.testing.assert_close(solve(problem, FIXED), solve(problem), rtol=0, atol=1e-8)


def test_the_value_of_a_sum_is_the_sum_of_the_values():
    q = torch.softmax(rows("plain", 4, 8), -1)
    total = (2 * KL.to(R) + 0.5 * HalfSquare() + Coverage(3, W)).value(q)
    torch.testing.assert_close(total, 2 * KL.to(R).value(q) + 0.5 * HalfSquare().value(q) + Coverage(3, W).value(q))


def test_a_factor_for_each_row():
    s, factor = rows("plain", 4, 12), [0.2, 1.0, 3.0, 0.5]
    each = column(factor).unsqueeze(-1)
    expected = [softmax(row, c) for row, c in zip(s.tolist(), factor, strict=True)]
    agree(solve(Problem(s, each * NegEntropy())), expected)
    agree(solve(Problem(s, each * NegEntropy()), "dual-root"), expected)
    expected = [sparsemax(row, c) for row, c in zip(s.tolist(), factor, strict=True)]
    agree(solve(Problem(s, each * HalfSquare())), expected)


@pytest.mark.parametrize("omega", [0 * NegEntropy(), 0 * HalfSquare(), 0.0 * Tsallis(1.3), 0 * Coverage(4)], ids=str)
def test_no_regulariser_at_all_is_greedy(omega):
    # a factor of zero is allowed, and leaves the score alone
    s = rows("plain", 3, 7)
    agree(solve(Problem(s, omega)), [greedy(row) for row in s.tolist()], 1e-8)


def test_coverage_alone_where_it_is_linear():
    s = rows("plain", 4, 7)
    # by one draw, Σ w·q is covered: the best of s + λw takes all
    w = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.0, 0.0, 2.0], dtype=DTYPE)
    agree(solve(Problem(s, Coverage(1, w))), [greedy(row) for row in (s + w).tolist()], 1e-8)


def test_coverage_alone_with_tokens_worth_nothing():
    # token 2 has no weight and the best score: it takes what the covered ones, 0 and 1, leave over
    s = torch.tensor([[1.5, -0.3, 2.8, 0.6]], dtype=DTYPE)
    problem = Problem(s, Coverage(4, torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=DTYPE)))
    # 4(1−q)³ = s_2 − s_v where covering is worth more than the difference of scores
    covered = (1 - ((s[:, 2:3] - s[:, :2]) / 4).pow(1 / 3)).clamp_min(0)
    expected = torch.cat([covered, 1 - covered.sum(-1, keepdim=True), torch.zeros(1, 1, dtype=DTYPE)], -1)
    agree(solve(problem), expected.tolist(), 1e-6)
    assert bool(certify(problem, solve(problem)).holds(1e-9).all())
