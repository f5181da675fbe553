"""Bad input gets a clear error that names the row or the parameter, and nothing is silently clamped."""

import itertools

import pytest
import torch

import simplexity as sx
from conftest import ready
from simplexity import Context, HalfSquare, MirrorAscent, NegEntropy, Problem, Status, decoder, solve

INF, NAN = float("inf"), float("nan")


def bad(value: float) -> torch.Tensor:
    scores = torch.zeros(3, 4)
    scores[1] = value if value == -INF else scores[1]
    if value != -INF:
        scores[1, 2] = value
    return scores


@pytest.mark.parametrize("name", sx.decoders())
@pytest.mark.parametrize(("value", "complaint"), [(NAN, "NaN"), (INF, r"\+inf"), (-INF, "no token is allowed")])
def test_scores_that_cannot_be_solved_name_their_row(name, value, complaint):
    for call in (ready(name).distribution, ready(name).sample, ready(name).certify, ready(name).describe):
        with pytest.raises(ValueError, match=f"row 1: .*{complaint}"):
            call(bad(value))


@pytest.mark.parametrize("name", sx.decoders())
@pytest.mark.parametrize(("value", "status"), [(NAN, Status.NAN), (INF, Status.INFINITE), (-INF, Status.FORBIDDEN)])
def test_without_validation_there_is_a_status_and_the_other_rows_are_right(name, value, status):
    d = ready(name)
    q, found = d.distribution(bad(value), validate=False)
    assert found.tolist() == [0, status, 0]
    assert (q[1] == 0).all()
    torch.testing.assert_close(q[[0, 2]], d.distribution(torch.zeros(2, 4)))
    tokens, found = d.sample(bad(value), validate=False, seeds=[1, 2, 3])
    assert found.tolist() == [0, status, 0]
    assert tokens[1] == -1
    assert (tokens[[0, 2]] >= 0).all()


def test_rows_of_a_batch_of_batches_are_named_in_full():
    scores = torch.zeros(2, 2, 3)
    scores[1, 0, 0] = scores[0, 1, 0] = NAN
    with pytest.raises(ValueError, match=r"rows \(0, 1\), \(1, 0\): a NaN"):
        decoder("softmax").distribution(scores)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("top-p:p=0", r"top-p: p must be in \(0, 1\], got 0"),
        ("top-p:p=1.2", r"top-p: p must be in \(0, 1\], got 1.2"),
        ("top-p:p=nan", "top-p: p must be in"),
        ("top-p:p=much", "top-p: p must be in .* got 'much'"),
        ("top-p:temperature_last=yes", "true or false, got 'yes'"),
        ("top-k:k=0", "top-k: k must be a whole number >= 1, got 0"),
        ("top-k:k=2.5", "top-k: k must be a whole number >= 1, got 2.5"),
        ("softmax:temperature=0", "softmax: temperature must be a number above 0, got 0.*use greedy"),
        ("softmax:temperature=-1", "softmax: temperature must be"),
        ("softmax:temperature=inf", "softmax: temperature must be"),
        ("softmax:temperature=1e-50", "softmax: temperature must be a number above 0, from 1e-30 to 1e30 in size, got"),
        ("bok:lam=1e-40", "bok: lam must be a number >= 0, 0 or from 1e-30 to 1e30 in size, got 1e-40"),
        ("top-k:k=inf", "top-k: k must be a whole number >= 1, .* got inf"),
        ("bok:k=inf", "bok: k must be"),
        ("bok:m=inf", "bok: m must be"),
        ("bok:steps=inf", "bok: steps must be a whole number >= 0 for all rows"),
        ("sparsemax:lam=-1", "sparsemax: lam must be a number >= 0, got -1"),
        ("entmax:alpha=0.5", "entmax: alpha must be a number >= 1, got 0.5"),
        ("bok:k=0", "bok: k must be"),
        ("bok:beta=-1", "bok: beta must be"),
        ("bok:lam=-0.1", "bok: lam must be"),
        (
            "bok:weights=best",
            "bok: weights must be one of probs, top-m, rank, uniform, frontier or a callable, got 'best'",
        ),
        ("bok:solver=newton", "bok: solver must be one of mirror, exact"),
        ("bok:step=30", r"bok: step·lam must be below 2, got 3"),
        ("bok:step=0", "bok: step must be a number above 0"),
        ("topp", "unknown decoder 'topp', did you mean 'top-p'"),
        ("", "unknown decoder ''"),
        ("top-p:q=0.9", "top-p: unknown parameter 'q'.*p, temperature, temperature_last"),
        ("top-p:temprature=1", "did you mean 'temperature'"),
        ("top-p:p", "expected name:parameter=value"),
        ("top-p:p=0.5,p=0.6", "p is given twice"),
        ("greedy:entropy=1", "greedy: unknown parameter 'entropy'"),
        ("softmax:entropy=0", "softmax: entropy must be"),
        ("softmax:entropy=1,temperature=2", "give one of temperature, entropy"),
        ("softmax:entropy=1,effective_temperature=2", "give one of temperature, entropy"),
    ],
)
def test_specs(spec, complaint):
    with pytest.raises(ValueError, match=complaint):
        decoder(spec)


def test_other_specs():
    with pytest.raises(ValueError, match="a decoder is a spec such as"):
        decoder(7)  # pyright: ignore
    with pytest.raises(ValueError, match="a decoder is a spec such as"):
        decoder({"name": "top-p"})
    with pytest.raises(ValueError, match="must be a whole number"):
        decoder({"decoder": "top-k", "k": True})
    with pytest.raises(ValueError, match=r"softmax: unknown parameter 1\. There is: temperature"):
        decoder({"decoder": "softmax", 1: 2})  # pyright: ignore
    with pytest.raises(ValueError, match="function and cannot be written"):
        decoder({"decoder": "bok", "weights": torch.sigmoid}).to_json()


def test_scores_of_the_wrong_kind():
    for scores, complaint in [
        (torch.zeros(3, dtype=torch.int64), "floating point"),
        (torch.tensor(1.0), r"\[..., V\]"),
        (torch.zeros(2, 0), "V >= 1"),
        ([1.0, 2.0], "torch.Tensor"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            decoder("softmax").distribution(scores)


def test_parameters_per_row():
    with pytest.raises(ValueError, match=r"temperature must be a number or one value per row, shape \[3\]"):
        decoder({"decoder": "softmax", "temperature": torch.ones(2)}).distribution(torch.zeros(3, 4))
    with pytest.raises(
        ValueError, match="softmax: temperature must be a number above 0, got a tensor with values from 0"
    ):
        decoder({"decoder": "softmax", "temperature": torch.tensor([1.0, 0.0])})
    for wrong in (-1.0, INF, NAN, 1e31):
        with pytest.raises(ValueError, match="lam must be 0 or a number from 1e-30 to 1e30, but not in row 1"):
            solve(Problem(torch.zeros(2, 3), NegEntropy(), lam=torch.tensor([1.0, wrong])))
    with pytest.raises(ValueError, match="lam must be 0 or a number from"):
        Problem(torch.zeros(2, 3), NegEntropy(), lam=-1.0)


@pytest.mark.parametrize(
    ("step", "lam", "complaint"),
    [
        ([30.0, 1.0], 0.1, "step·lam must be below 2, got 3"),
        (1.0, [0.1, 2.0], "step·lam must be below 2, got 2"),
        ([15.0, 1.0], [[0.5], [0.1]], "step·lam must be below 2, got 7.5"),
        ([15.0, 1.0], [[0.1], [0.5]], None),
        ([15.0, 1.0], [0.1, 0.5, 1.0], "step and lam are for different rows"),
    ],
)
def test_a_step_that_diverges_in_some_row(step, lam, complaint):
    values = {"decoder": "bok", "step": step, "lam": lam}
    if complaint is None:
        assert torch.isfinite(decoder(values).distribution(torch.randn(2, 4))).all()
        return
    with pytest.raises(ValueError, match=complaint):
        decoder(values)


def test_supports():
    scores = torch.zeros(2, 4)
    for k in (0, 2.5, INF, NAN):
        with pytest.raises(ValueError, match="TopK: k must be a whole number >= 1, got"):
            sx.TopK(k)  # pyright: ignore
    with pytest.raises(ValueError, match="TopK: k must be a whole number >= 1 in every row"):
        solve(Problem(scores, NegEntropy(), support=sx.TopK(torch.tensor([2.5, 1.0]))))
    for rule in (lambda: sx.Then(sx.Banned([0]), 3), lambda: sx.Banned([0]).then(3)):  # pyright: ignore
        with pytest.raises(ValueError, match=r"Then: both rules must be Supports .*, got 3"):
            rule()
    with pytest.raises(ValueError, match="TopP: p must be"):
        sx.TopP(0.0)
    with pytest.raises(ValueError, match=r"Allowed: token ids must be in \[0, 4\), got 4"):
        solve(Problem(scores, NegEntropy(), support=sx.Allowed([1, 4])))
    with pytest.raises(ValueError, match="one list per row"):
        solve(Problem(scores, NegEntropy(), support=sx.Banned([[1], [2], [3]])))
    with pytest.raises(ValueError, match="row 1: no token is allowed"):
        solve(Problem(scores, NegEntropy(), support=sx.Banned([[0], [0, 1, 2, 3]])))
    with pytest.raises(ValueError, match="support must be a Support"):
        Problem(scores, NegEntropy(), support=50)  # pyright: ignore


def test_regularisers():
    with pytest.raises(ValueError, match="object with value"):
        Problem(torch.zeros(3), "entropy")  # pyright: ignore
    for factor in (-1.0, INF, NAN):
        with pytest.raises(ValueError, match="multiplied by a finite number >= 0"):
            factor * NegEntropy()
        with pytest.raises(ValueError, match="the factor of a regulariser must be finite and >= 0, but not in row 1"):
            solve(Problem(torch.zeros(2, 2), torch.tensor([[1.0], [factor]]) * NegEntropy()))
        with pytest.raises(ValueError, match="weights must be finite and >= 0, but not in row 0"):
            solve(Problem(torch.zeros(1, 2), NegEntropy() + sx.Coverage(2, torch.tensor([[1.0, factor]]))))
        with pytest.raises(ValueError, match="weights must be finite and >= 0, got"):
            solve(Problem(torch.zeros(1, 2), NegEntropy() + sx.Coverage(2, factor)))
    for alpha in (1.0, INF, NAN):
        with pytest.raises(ValueError, match="alpha must be finite and above 1, got"):
            sx.Tsallis(alpha)
        with pytest.raises(ValueError, match="alpha must be finite and above 1, but not in row 0"):
            solve(Problem(torch.zeros(2, 2), sx.Tsallis(torch.tensor([[alpha], [2.0]]))))
    for k in (0, 2.5, INF):
        with pytest.raises(ValueError, match="Coverage: k must be a whole number >= 1, got"):
            sx.Coverage(k)  # pyright: ignore
        with pytest.raises(ValueError, match="Coverage: k must be a whole number >= 1, but not in row 1"):
            solve(Problem(torch.zeros(2, 2), NegEntropy() + sx.Coverage(torch.tensor([[2], [k]]))))
    with pytest.raises(ValueError, match="reference distribution holds NaN"):
        solve(Problem(torch.zeros(1, 2), sx.KL(torch.tensor([[NAN, 0.0]]))))


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize(
    "omega",
    [
        sx.KL(torch.zeros(2, 4)),
        sx.KL(torch.zeros(5)),
        sx.JS(torch.zeros(5)),
        NegEntropy() + sx.Coverage(2, torch.ones(5)),
        NegEntropy() + sx.Coverage(torch.tensor([[1], [2]])),
        sx.Tsallis(torch.tensor([[1.5], [2.0]])),
        torch.tensor([[1.0], [2.0]]) * NegEntropy(),
    ],
)
def test_a_regulariser_for_other_rows_or_tokens(omega, validate):
    with pytest.raises(ValueError, match=r"must be (\[4\] like the scores|a number or \[1\]), got"):
        solve(Problem(torch.zeros(4), omega), validate=validate)


def test_weights_of_ones_own_with_a_wrong_shape():
    d = decoder({"decoder": "bok", "weights": lambda scores: torch.ones(3)})
    for call in (d.distribution, d.sample, d.certify):
        with pytest.raises(ValueError, match=r"Coverage: weights must be \[2, 4\] like the scores, got \[3\]"):
            call(torch.zeros(2, 4))
    for one in (decoder({"decoder": "bok", "weights": lambda scores: 1.0}), decoder("bok:weights=uniform")):
        torch.testing.assert_close(one.distribution(torch.zeros(2, 4)), torch.full((2, 4), 0.25))


def test_points_that_have_no_projection():
    for point, complaint in [
        (torch.tensor([1, 2]), "must be a floating-point tensor, got torch.int64"),
        (torch.tensor([1.0, NAN]), "the row holds NaN"),
        (torch.tensor([[1.0, 2.0], [INF, 1.0]]), "row 1 holds NaN or \\+inf"),
    ]:
        with pytest.raises(ValueError, match=f"project_to_simplex: .*{complaint}"):
            sx.project_to_simplex(point)
    with pytest.raises(ValueError, match="no entry inside the mask"):
        sx.project_to_simplex(torch.ones(2), torch.zeros(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask must be bool \[2\]"):
        sx.project_to_simplex(torch.ones(2), torch.ones(3, dtype=torch.bool))


def test_a_solver_that_cannot_says_why_and_which_can():
    class Spread:
        def value(self, q):
            return (q - q.mean(-1, keepdim=True)).square().sum(-1)

    problem = Problem(torch.zeros(3), Spread())  # pyright: ignore
    with pytest.raises(ValueError, match=r"closed-form cannot .* closed form. These can: mirror-ascent"):
        solve(problem, "closed-form")
    with pytest.raises(ValueError, match=r"dual-root cannot .* not separable.* These can: mirror-ascent"):
        solve(problem, "dual-root")
    for vertex in (Problem(torch.zeros(3), HalfSquare(), lam=0.0), Problem(torch.zeros(3), sx.Zero())):
        with pytest.raises(ValueError, match=r"dual-root cannot .* vertex.* These can: closed-form"):
            solve(vertex, "dual-root")
    for wrong in (42, int):
        with pytest.raises(ValueError, match=r"a solver is one of closed-form, dual-root, mirror-ascent"):
            solve(problem, wrong)  # pyright: ignore
    with pytest.raises(ValueError, match=r"unknown solver 'simplex': choose from closed-form"):
        solve(problem, "simplex")
    with pytest.raises(ValueError, match=r"start='reference' needs"):
        solve(problem, MirrorAscent(start="reference"))
    for wrong in (
        {"geometry": "hyperbolic"},
        {"steps": -1},
        {"steps": INF},
        {"max_steps": 0},
        {"max_steps": 2.5},
        {"max_steps": -1},
        {"step": 0.0},
        {"step": INF},
        {"longest": -1.0},
        {"tolerance": -1.0},
        {"tolerance": NAN},
        {"steps": 3, "tolerance": 1e-3},
        {"start": "x"},
    ):
        with pytest.raises(ValueError, match=rf"mirror-ascent: .*{next(iter(wrong))}"):
            MirrorAscent(**wrong)
    for start, complaint in [
        ([[0.0, 0.0]], "start has no mass on the support in row 0"),
        ([[2.0, -1.0]], "start must be finite and >= 0, but not in row 0"),
        ([[-1.0, -1.0]], "start must be finite and >= 0, but not in row 0"),
        ([[INF, 1.0]], "start must be finite and >= 0, but not in row 0"),
        ([[1.0, 1.0, 1.0]], r"start must be \[1, 2\] like the scores, but is \[1, 3\]"),
        ([[1.0, 1.0], [1.0, 1.0]], r"start must be \[1, 2\] like the scores, but is \[2, 2\]"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            solve(Problem(torch.zeros(1, 2), NegEntropy()), MirrorAscent(start=torch.tensor(start)))
    with pytest.raises(ValueError, match="step must be finite and above 0, but not in row 1"):
        solve(Problem(torch.zeros(2, 2), NegEntropy()), MirrorAscent(step=torch.tensor([1.0, -1.0])))


def test_an_ascent_that_does_not_arrive_warns():
    problem = Problem(torch.randn(2, 9).double(), NegEntropy())
    with pytest.warns(RuntimeWarning, match=r"stopped after 2 steps with a gap of .* in rows 0, 1"):
        solve(problem, MirrorAscent(step=0.1, max_steps=2, tolerance=1e-9))


def test_an_ascent_that_cannot_arrive_says_why():
    one_hot = torch.eye(3)[:2]
    problem = Problem(torch.tensor([[1.0, 0.0, 0.5], [0.0, 500.0, 0.5]]), NegEntropy())  # the second start is right
    with pytest.warns(RuntimeWarning, match=r"in row 0: in row 0 the start gives no mass to tokens that the optimum"):
        solve(problem, MirrorAscent(start=one_hot, max_steps=3))


def test_draws_and_contexts():
    for name in ("mask", "other", "rewards", "tokens", "siblings"):
        with pytest.raises(ValueError, match=f"context.{name} must be a torch.Tensor, got list"):
            Context(**{name: [True, False]})  # pyright: ignore
    with pytest.raises(ValueError, match=r"one entry per row, shape \[2\], got \[3\]"):
        decoder("softmax").sample(torch.zeros(2, 4), seeds=[1, 2, 3])
    with pytest.raises(ValueError, match=r"whole numbers"):
        decoder("softmax").sample(torch.zeros(2, 4), seeds=torch.ones(2))
    with pytest.raises(ValueError, match=r"row 1 of q has no mass"):
        sx.draw(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    with pytest.raises(ValueError, match=r"context.mask must be bool"):
        decoder("softmax").distribution(torch.zeros(2, 4), Context(mask=torch.ones(2, 4)))
    with pytest.raises(ValueError, match="row 0: no token is allowed"):
        decoder("softmax").distribution(torch.zeros(1, 4), Context(mask=torch.zeros(1, 4, dtype=torch.bool)))
    with pytest.raises(ValueError, match="q must have the shape of the scores"):
        sx.certify(Problem(torch.zeros(2, 4), NegEntropy()), torch.ones(4) / 4)


def test_tensors_obey_the_rules_of_numbers():
    for name, values in (
        ("top-k", {"k": [1.5, 2.0]}),
        ("top-k", {"k": [True, False]}),
        ("softmax", {"temperature": [1.0, INF]}),
        ("kl", {"temperature": [1e-50, 1.0]}),
        ("bok", {"temperature": [1e-50, 1.0]}),
        ("bok", {"beta": [1e39, 1.0]}),
        ("bok", {"lam": [1e39, 1.0]}),
        ("bok", {"steps": [1, 2]}),
        ("top-p", {"p": ["a"]}),
        ("top-p", {"p": [[0.1], [0.2, 0.3]]}),
        ("top-p", {"p": [None]}),
    ):
        with pytest.raises(ValueError, match=f"{name}: {next(iter(values))} must be"):
            decoder({"decoder": name, **values})
    for ids in (torch.tensor([True, False]), torch.tensor([1.0]), {1, 2}, [True, False], [1.5], [[1.5], [2]], ["a"]):
        with pytest.raises(ValueError, match="Allowed: ids must be"):
            sx.Allowed(ids)  # pyright: ignore
    with pytest.raises(ValueError, match="temperature must be above 0 in every row"):
        solve(Problem(torch.zeros(2, 3), NegEntropy(), support=sx.TopP(0.9, torch.tensor([-1.0, 1.0]))))


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"context.mask must be bool \[4\]"):
        decoder("softmax").distribution(torch.zeros(4), Context(mask=torch.ones(2, 4, dtype=torch.bool)))
    with pytest.raises(ValueError, match=r"context.other must be \[4\]"):
        decoder("kl").distribution(torch.zeros(4), Context(other=torch.zeros(2, 4)))
    with pytest.raises(ValueError, match="step must be whole numbers"):
        decoder("softmax").sample(torch.zeros(4), seeds=1, step=torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="one value per row"):
        decoder({"decoder": "softmax", "temperature": torch.ones(2)}).distribution(torch.zeros(2, 2, 4))
    with pytest.raises(ValueError, match="a generator or seeds, not both"):
        decoder("softmax").sample(torch.zeros(2, 4), torch.Generator(), seeds=[1, 2])


def test_a_bad_reference_or_lam_has_a_status():
    other = torch.zeros(2, 4)
    for value in (NAN, INF):
        other[1, 0] = value
        q, status = decoder("kl").distribution(torch.zeros(2, 4), Context(other=other), validate=False)
        assert status.tolist() == [0, Status.NAN]
        assert (q[1] == 0).all()
    for lam, omega in itertools.product((-1.0, INF, NAN), (NegEntropy(), HalfSquare(), sx.Tsallis(1.5))):
        q, status = solve(Problem(torch.zeros(2, 4), omega, lam=torch.tensor([1.0, lam])), validate=False)
        assert status.tolist() == [0, Status.PARAMETER]
        assert (q[1] == 0).all()
        assert q[0].tolist() == [0.25] * 4


def test_an_omega_that_is_not_convex_does_not_pass_for_solved():
    class Hollow:
        separable = True

        def value(self, q):
            return -q.square().sum(-1)

    problem = Problem(torch.randn(2, 4), Hollow())  # pyright: ignore
    with pytest.raises(ValueError, match="rows 0, 1: dual-root found no distribution"):
        solve(problem, "dual-root")
    q, status = solve(problem, "dual-root", validate=False)
    assert status.tolist() == [Status.UNSOLVED] * 2
    assert (q == 0).all()


@pytest.mark.parametrize(
    "setting",
    [{}, {"steps": 3}, {"step": 0.1}, {"geometry": "euclidean"}, {"step": 0.1, "geometry": "euclidean"}],
    ids=str,
)
def test_an_omega_that_is_nan_does_not_pass_for_solved(setting):
    class Undefined:
        def value(self, q):
            return NAN * q.sum(-1)

    problem = Problem(torch.randn(2, 4), Undefined())  # pyright: ignore
    with pytest.raises(ValueError, match="rows 0, 1: mirror-ascent found no distribution"):
        solve(problem, MirrorAscent(**setting))
    assert solve(problem, MirrorAscent(**setting), validate=False)[1].tolist() == [Status.UNSOLVED] * 2


def test_a_start_off_the_support_has_a_status():
    problem = Problem(torch.zeros(2, 4), NegEntropy(), support=sx.Allowed([1]))
    start = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    q, status = solve(problem, MirrorAscent(start=start), validate=False)
    assert status.tolist() == [Status.UNSOLVED, 0]
    assert q.tolist() == [[0.0] * 4, [0.0, 1.0, 0.0, 0.0]]
