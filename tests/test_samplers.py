"""The samplers people know: they keep the tokens that transformers and llama.cpp keep, as problems like the rest."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import simplexity as sx
from simplexity import Context, MirrorAscent, NegEntropy, Problem, certify, decoder, solve
from simplexity.draw import uniform
from simplexity.penalties import penalise

ROWS = 1000
INF = float("inf")
WARPERS = {
    "min-p": (MinPLogitsWarper, "p", [0.0, 0.02, 0.1, 0.7, 1.0]),
    "typical": (TypicalLogitsWarper, "p", [0.1, 0.5, 0.9, 0.99]),
    "epsilon": (EpsilonLogitsWarper, "epsilon", [3e-4, 0.01, 0.2]),
    "eta": (EtaLogitsWarper, "epsilon", [3e-4, 0.01, 0.2]),
    "top-h": (TopHLogitsWarper, "h", [0.1, 0.4, 0.9]),
}
CASES = [(name, value) for name, (_, _, values) in WARPERS.items() for value in values]


def rows(size: int, spread: float, seed: int = 0) -> Tensor:
    return spread * torch.randn(ROWS, size, generator=torch.Generator().manual_seed(size + seed), dtype=torch.float64)


def theirs(name: str, value: float, s: Tensor, temperature: float = 1.0) -> Tensor:
    """What transformers leaves of the scores, temperature first."""
    ids = torch.zeros(len(s), 1, dtype=torch.int64)
    return WARPERS[name][0](value)(ids, TemperatureLogitsWarper(temperature)(ids, s.clone()))


def both(spec: str, s: Tensor) -> list[Tensor]:
    """q by the path on a CPU, which cuts columns away, and by the one that reads nothing."""
    blind, status = decoder(spec).distribution(s, validate=False)
    assert not status.any()
    return [decoder(spec).distribution(s), blind]


@pytest.mark.parametrize(("size", "spread"), [(5, 3.0), (300, 0.1), (300, 3.0), (1100, 12.0)])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(("name", "value"), CASES)
def test_transformers_keeps_the_same_tokens(name, value, temperature, size, spread):
    s = rows(size, spread)
    warped = theirs(name, value, s, temperature)
    for q in both(f"{name}:{WARPERS[name][1]}={value},temperature={temperature}", s):
        assert torch.equal(q > 0, (warped > -INF) & (torch.softmax(warped, -1) > 0))
        torch.testing.assert_close(q, torch.softmax(warped, -1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "value"), CASES)
def test_ties(name, value):
    s = rows(300, 3.0).round()
    expected = torch.softmax(theirs(name, value, s), -1)
    for q in both(f"{name}:{WARPERS[name][1]}={value}", s):
        if name == "top-h":  # which of the tied tokens at its cut stay is left to chance there, to the lowest ids here
            torch.testing.assert_close(q.sort(-1).values, expected.sort(-1).values, rtol=0, atol=1e-12)
            for token in range(1, 300):  # a token that stays has no twin with a lower id that does not
                twins = (s[:, :token] == s[:, token : token + 1]) & (q[:, :token] == 0)
                assert not (twins.any(-1) & (q[:, token] > 0)).any()
        else:
            torch.testing.assert_close(q, expected, rtol=0, atol=1e-12)


def test_typical_with_mass_one_keeps_everything():
    s = torch.tensor([[0.0, -1.0, -60.0, -INF]]).double()  # the third weighs nothing in a sum of doubles
    for p in (1.0, torch.tensor([1.0])):
        assert sx.Typical(p).mask(s).tolist() == [[True, True, True, False]]
        assert (decoder({"decoder": "typical", "p": p}).distribution(s) > 0).tolist() == [[True, True, True, False]]


def test_a_row_below_its_floor_beside_one_with_many_tokens_above():
    s = torch.zeros(2, 300).double()
    s[0, 90:] = -9.0
    for q in both("epsilon:epsilon=0.01", s):
        assert (q > 0).sum(-1).tolist() == [90, 300]


@pytest.mark.parametrize("name", WARPERS)
def test_forbidden_tokens_stay_forbidden(name):
    parameter, value = WARPERS[name][1], WARPERS[name][2][-2]
    s = rows(300, 3.0)
    mask = torch.rand(s.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[:, 0] = True
    warped = theirs(name, value, s.masked_fill(~mask, -INF))
    d = decoder(f"{name}:{parameter}={value}")
    for q in (d.distribution(s.masked_fill(~mask, -INF)), d.distribution(s, Context(mask=mask))):
        torch.testing.assert_close(q, torch.softmax(warped, -1), rtol=0, atol=1e-12)


def test_the_cap_of_top_h():
    flat = torch.zeros(2, 500, dtype=torch.float64)
    for q in both("top-h:h=1", flat):
        assert (q > 0).sum(-1).tolist() == [100, 100]
        assert (q[:, :100] > 0).all()
    assert torch.equal(sx.TopH(1.0, cap=7).mask(flat).sum(-1), torch.tensor([7, 7]))


@pytest.mark.parametrize("spec", ["min-p:p=0.3", "typical:p=0.6", "epsilon:epsilon=0.02", "eta:epsilon=0.2", "top-h"])
def test_temperature_last_cuts_at_one_and_divides_then(spec):
    s = rows(50, 3.0)[:50]
    name, _, rest = spec.partition(":")
    value = float(rest.partition("=")[2] or 0.4)
    warped = theirs(name, value, s) / 1.7
    q = decoder(f"{spec}{',' if rest else ':'}temperature=1.7,temperature_last=true").distribution(s)
    torch.testing.assert_close(q, torch.softmax(warped, -1), rtol=0, atol=1e-12)
    assert not torch.equal(q > 0, theirs(name, value, s, 1.7) > -INF)


def test_at_the_size_of_a_vocabulary_both_paths_agree():
    g = torch.Generator().manual_seed(3)
    s = torch.randn(3, 151_936, generator=g) * 2.5 - 20
    s[:2, :200] += torch.linspace(45, 10, 200)
    s[2] *= 0.01
    for spec in ["min-p", "typical", "epsilon", "eta", "top-n-sigma", "top-h", "xtc:probability=1", "js", "adaptive"]:
        quick, blind = both(spec, s)
        # float32: a token at the very edge of a cut may fall either way
        assert (quick - blind).abs().sum(-1).max() < 1e-3, spec
        assert (decoder(spec).certify(s).gap < 1e-4).all(), spec
        assert (quick.double().sum(-1) - 1).abs().max() < 1e-6


# Rows worked out by hand from llama.cpp's rules (src/llama-sampling.cpp): probabilities in, probabilities out.
TENTHS = [0.4, 0.3, 0.2, 0.1]


@pytest.mark.parametrize(
    ("p", "n", "expected"),
    [
        # logs: −0.916, −1.204, −1.609, −2.303; mean −1.508, σ = 0.522: from −1.438 on
        (TENTHS, 1.0, [4 / 7, 3 / 7, 0, 0]),
        (TENTHS, 1.4, [4 / 9, 3 / 9, 2 / 9, 0]),  # −1.647
        (TENTHS, 3.0, TENTHS),
        (TENTHS, 0.5, [1, 0, 0, 0]),  # −1.177
        # the forbidden token is no part of the mean: logs −0.693, −1.386; σ = 0.347
        ([0.5, 0.25, 0.0, 0.0], 1.9, [1, 0, 0, 0]),
        ([0.5, 0.25, 0.0, 0.0], 2.1, [2 / 3, 1 / 3, 0, 0]),
        ([0.25, 0.25, 0.25, 0.25], 1.0, [0.25, 0.25, 0.25, 0.25]),
        ([1.0, 0.0, 0.0, 0.0], 1.0, [1, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("temperature", [1.0, 0.3, 5.0])
def test_llama_cpps_top_n_sigma(p, n, expected, temperature):
    s = torch.tensor(p).double().log() * temperature  # the cut does not depend on the scale of the scores
    for q in both(f"top-n-sigma:n={n},temperature={temperature}", s):
        torch.testing.assert_close(q, torch.tensor(expected).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("p", "threshold", "expected"),
    [
        (TENTHS, 0.09, [0, 0, 0, 1]),
        (TENTHS, 0.19, [0, 0, 2 / 3, 1 / 3]),
        (TENTHS, 0.29, [0, 1 / 2, 1 / 3, 1 / 6]),
        (TENTHS, 0.39, TENTHS),  # one likely token is no choice
        (TENTHS, 0.6, TENTHS),
        ([0.1, 0.4, 0.2, 0.3], 0.19, [1 / 3, 0, 2 / 3, 0]),  # in any order of ids
        ([0.5, 0.5, 0.0, 0.0], 0.4, [1, 0, 0, 0]),  # of twins the lowest id stays
        ([0.3, 0.3, 0.3, 0.1], 0.2, [0.75, 0, 0, 0.25]),
    ],
)
def test_llama_cpps_xtc(p, threshold, expected):
    s = torch.tensor(p).double().log()
    for q in both(f"xtc:probability=1,threshold={threshold}", s):
        torch.testing.assert_close(q, torch.tensor(expected).double(), atol=1e-6, rtol=0)
    for q in both(f"xtc:probability=0,threshold={threshold}", s):
        torch.testing.assert_close(q, torch.tensor(p).double(), atol=1e-6, rtol=0)


def test_xtcs_coin_depends_on_seed_and_step_alone():
    d = decoder("xtc:probability=0.3")
    n = 4000
    s = torch.tensor(TENTHS).log().expand(n, 4)
    seeds = torch.arange(n)
    fired = d.distribution(s, Context(seeds=seeds, step=5))[:, 0] == 0
    assert abs(fired.double().mean() - 0.3) < 0.03
    # whatever the scores and the neighbours
    other = torch.tensor([0.5, 0.45, 0.05, 0.0]).log().expand(n, 4)
    assert torch.equal(d.distribution(other.flip(0), Context(seeds=seeds.flip(0), step=5))[:, 0] == 0, fired.flip(0))
    assert not torch.equal(d.distribution(s, Context(seeds=seeds, step=6))[:, 0] == 0, fired)
    # a draw throws the same coin, by seeds and step given either way
    for tokens in (d.sample(s, seeds=seeds, step=5), d.sample(s, context=Context(seeds=seeds, step=5))):
        assert not (fired & (tokens < 3)).any()
        assert (~fired & (tokens < 3)).sum() > 0.8 * (~fired).sum()
    # and the token is drawn by another number: among the rows that fired it is as uniform as among the others
    u = uniform(seeds, 5)
    assert abs(u[fired].mean() - 0.5) < 0.03
    assert abs(u[~fired].mean() - 0.5) < 0.03


def test_xtcs_coin_without_seeds_comes_from_the_generator():
    d, s = decoder("xtc"), torch.tensor(TENTHS).log().expand(500, 4)
    first = d.sample(s, torch.Generator().manual_seed(3))
    assert torch.equal(first, d.sample(s, torch.Generator().manual_seed(3)))
    share = (first < 3).double().mean()
    assert 0.3 < share < 0.6  # half of the rows, nine tenths of their draws
    torch.manual_seed(4)
    a = d.distribution(s)
    torch.manual_seed(4)
    assert torch.equal(a, d.distribution(s))
    assert 150 < (a[:, 0] == 0).sum() < 350
    with pytest.raises(ValueError, match="a generator or seeds, not both"):
        d.sample(s, torch.Generator(), seeds=torch.arange(500))


def test_each_row_may_have_its_own_parameters():
    s = rows(60, 3.0)[:3]
    cases = {
        "min-p": {"p": [0.0, 0.1, 1.0], "temperature": [0.5, 1.0, 2.0]},
        "typical": {"p": [0.2, 0.9, 1.0], "temperature": [0.5, 1.0, 2.0]},
        "epsilon": {"epsilon": [0.3, 0.01, 1.0], "temperature": [0.5, 1.0, 2.0]},
        "eta": {"epsilon": [0.3, 0.01, 1.0], "temperature": [0.5, 1.0, 2.0]},
        "top-n-sigma": {"n": [0.5, 1.0, 3.0], "temperature": [0.5, 1.0, 2.0]},
        "top-h": {"h": [0.1, 0.5, 1.0], "temperature": [0.5, 1.0, 2.0]},
        "xtc": {"probability": [0.0, 1.0, 1.0], "threshold": [0.1, 0.1, 0.02], "temperature": [0.5, 1.0, 2.0]},
        "adaptive": {"theta": [0.0, 0.5, 3.0], "temperature": [0.5, 1.0, 2.0]},
        "js": {"lam": [0.0, 1.0, 9.0], "temperature": [0.5, 1.0, 2.0]},
    }
    for name, values in cases.items():
        together = decoder({"decoder": name, **values}).distribution(s)
        blind, status = decoder({"decoder": name, **values}).distribution(s, validate=False)
        assert not status.any()
        torch.testing.assert_close(blind, together, atol=1e-12, rtol=0)
        for i in range(3):
            alone = decoder({"decoder": name, **{k: v[i] for k, v in values.items()}})
            torch.testing.assert_close(together[i], alone.distribution(s[i]), atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (lambda: sx.MinP(1.5), r"MinP: p must be in \[0, 1\], got 1.5"),
        (lambda: sx.Typical(0.0), r"Typical: p must be in \(0, 1\]"),
        (lambda: sx.Epsilon(0.1, temperature=0.0), "Epsilon: temperature must be a number above 0"),
        (lambda: sx.TopNSigma(-1.0), "TopNSigma: n must be"),
        (lambda: sx.TopH(0.5, cap=0), "TopH: cap must be a whole number >= 1"),
        (lambda: sx.XTC("much"), "XTC: threshold must be"),  # pyright: ignore
        (
            lambda: solve(Problem(torch.zeros(2, 3), NegEntropy(), support=sx.Eta(torch.tensor([0.1, 2.0])))),
            "every row",
        ),
        (lambda: solve(Problem(torch.full((2, 9), -INF), NegEntropy(), support=sx.MinP(0.1))), "rows 0, 1: no token"),
        (lambda: solve(Problem(torch.full((1, 9), -INF), NegEntropy(), support=sx.TopP(0.1))), "row 0: no token"),
        (lambda: decoder("min-p:p=2"), r"min-p: p must be in \[0, 1\], got 2"),
        (lambda: decoder("top-n-sigma:n=0"), "top-n-sigma: n must be a number above 0"),
        (lambda: decoder("epsilon:entropy=1"), "need temperature_last=true"),
        (lambda: decoder("xtc:entropy=1"), "chance decides"),
        (lambda: solve(Problem(torch.zeros(1, 2), sx.JS(torch.tensor([[float("nan"), 0.0]])))), "JS: the reference"),
    ],
)
def test_what_makes_no_sense_is_refused(made, complaint):
    with pytest.raises(ValueError, match=complaint):
        made()


def test_targets_are_met_or_the_next_token_is_too_much():
    s = rows(40, 3.0)[:200]
    for spec in [
        "min-p",
        "typical",
        "eta",
        "epsilon:temperature_last=true",
        "top-n-sigma:n=3",
        "top-h:h=0.9",
        "adaptive",
    ]:
        d = decoder(f"{spec}{',' if ':' in spec else ':'}entropy=0.5")
        h = d.describe(s).entropy
        assert (h <= 0.5 + 1e-6).all(), spec
        assert ((h - 0.5).abs() < 1e-6).double().mean() > 0.3, spec


# Aliases


@pytest.mark.parametrize(
    ("spec", "short"),
    [
        ("min-p:min_p=0.2", "min-p:p=0.2"),
        ("typical:typical_p=0.5", "typical:p=0.5"),
        ("epsilon:epsilon_cutoff=0.01", "epsilon:epsilon=0.01"),
        ("eta:eta_cutoff=0.01", "eta:epsilon=0.01"),
        ("top-n-sigma:top_n_sigma=2", "top-n-sigma:n=2.0"),
        ("top-h:top_h=0.5", "top-h:h=0.5"),
        ("xtc:xtc_probability=0.1,xtc_threshold=0.2", "xtc:probability=0.1,threshold=0.2"),
        ("top-p:top_p=0.5,temperature=2", "top-p:p=0.5,temperature=2.0"),
        ("top-k:top_k=3", "top-k:k=3"),
        (
            "greedy:repetition_penalty=1.2,presence_penalty=1,repeat_last_n=64",
            "greedy:repetition=1.2,presence=1.0,last=64",
        ),
    ],
)
def test_engines_names_are_read_and_the_short_ones_written(spec, short):
    assert str(decoder(spec)) == short
    assert decoder(spec) == decoder(short) == decoder(decoder(spec).to_json())
    name, _, rest = spec.partition(":")
    key, _, value = rest.split(",")[0].partition("=")
    assert decoder({"decoder": name, key: float(value)}) == decoder(f"{name}:{key}={value}")


def test_a_parameter_given_under_both_names_is_refused():
    with pytest.raises(ValueError, match="top-p: p and top_p are the same parameter, give one of them"):
        decoder("top-p:p=0.9,top_p=0.9")
    with pytest.raises(ValueError, match="top_p and p are the same"):
        decoder({"decoder": "top-p", "top_p": 0.9, "p": 0.9})
    with pytest.raises(ValueError, match="min-p: unknown parameter 'top_p'"):
        decoder("min-p:top_p=0.9")


# Penalties


def test_transformers_repetition_penalty():
    s = rows(80, 3.0)
    tokens = torch.randint(0, 90, (ROWS, 30), generator=torch.Generator().manual_seed(1))  # some beyond the vocabulary
    for penalty in (1.3, 0.7):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(tokens, s.clone())
        assert torch.equal(penalise(s, tokens, repetition=penalty), expected)
    for spec, warper in (("top-p:p=0.8", TopPLogitsWarper(0.8)), ("top-k:k=5", TopKLogitsWarper(5)), ("softmax", None)):
        scores = RepetitionPenaltyLogitsProcessor(1.3)(tokens, s.clone())
        scores = scores if warper is None else warper(tokens, scores)
        q = decoder(f"{spec}{',' if ':' in spec else ':'}repetition=1.3").distribution(s, Context(tokens=tokens))
        torch.testing.assert_close(q, torch.softmax(scores, -1), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("tokens", "penalties", "expected"),
    [
        # five tokens at 0.2, as in llama.cpp's rule: log 0.2·50, or log 0.2 − 5·count − 5
        ([0], "repetition=50", [0, 0.25, 0.25, 0.25, 0.25]),
        ([0, 1, 2, 0, 0], "repetition=50", [0, 0, 0, 0.5, 0.5]),
        ([0], "frequency=5,presence=5", [0.000011, 0.249997, 0.249997, 0.249997, 0.249997]),
        ([0, 1, 2], "frequency=5,presence=5", [0.000023, 0.000023, 0.000023, 0.499966, 0.499966]),
        ([0, 1, 2, 0, 0], "frequency=5,presence=5", [0, 0.000023, 0.000023, 0.499977, 0.499977]),
        ([0, 0, 0], "presence=5", [0.001682, 0.249579, 0.249579, 0.249579, 0.249579]),  # e^-5/(4 + e^-5)
        ([3, 3, 0, -1], "presence=5,last=2", [0.001682, 0.249579, 0.249579, 0.249579, 0.249579]),
        ([], "presence=5", [0.2] * 5),
    ],
)
def test_llama_cpps_penalties(tokens, penalties, expected):
    s = torch.full((5,), 0.2).double().log()
    seen = Context(tokens=torch.tensor(tokens, dtype=torch.int64))
    q = decoder(f"softmax:{penalties}").distribution(s, seen)
    torch.testing.assert_close(q, torch.tensor(expected).double(), atol=1e-6, rtol=0)


def test_penalties_go_with_every_decoder_and_are_certified():
    s = rows(50, 3.0)[:4]
    tokens = torch.tensor([[1, 2, 3], [-1, -1, 5], [7, 7, 7], [-1, -1, -1]])
    changed = penalise(s, tokens, repetition=1.5, presence=0.5, frequency=0.2)
    for name, kind in sx.decoders().items():
        if kind.needs or not kind.__module__.startswith("simplexity."):
            continue
        d = decoder(f"{name}:repetition=1.5,presence=0.5,frequency=0.2")
        seen = Context(tokens=tokens, seeds=torch.arange(4))
        plain = decoder(name).distribution(changed, Context(seeds=torch.arange(4)))
        torch.testing.assert_close(d.distribution(s, seen), plain, atol=1e-12, rtol=0)
        blind, status = d.distribution(s, seen, validate=False)
        assert not status.any()
        torch.testing.assert_close(blind, plain, atol=1e-9, rtol=0)
        assert (
            d.certify(s, seen).gap <= decoder(name).certify(changed, Context(seeds=torch.arange(4))).gap + 1e-9
        ).all()
    rowwise = decoder(
        {"decoder": "softmax", "presence": torch.tensor([0.0, 1.0, 2.0, 3.0]), "last": torch.tensor([1, 2, 3, 3])}
    )
    expected = penalise(s, tokens, presence=torch.tensor([0.0, 1.0, 2.0, 3.0]), last=torch.tensor([1, 2, 3, 3]))
    torch.testing.assert_close(rowwise.distribution(s, Context(tokens=tokens)), torch.softmax(expected, -1))


def test_penalties_need_the_text_so_far():
    with pytest.raises(ValueError, match="a penalty needs the tokens so far"):
        decoder("softmax:presence=1").distribution(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"context.tokens must be whole numbers \[2, 'T'\]"):
        decoder("softmax:presence=1").distribution(torch.zeros(2, 4), Context(tokens=torch.zeros(3, 4).long()))
    with pytest.raises(ValueError, match="softmax: repetition must be a number above 0, got 0"):
        decoder("softmax:repetition=0")
    assert torch.equal(decoder("softmax:last=3").distribution(torch.zeros(4)), torch.full((4,), 0.25))


# Adaptive temperature, JS, the frontier


def test_adaptive_is_softmax_at_the_papers_temperature():
    s = rows(30, 2.0)[:50]
    h = sx.entropy(torch.softmax(s, -1)).unsqueeze(-1)
    expected = torch.softmax(s / (1.4 * 0.8 ** (0.6 / h)), -1)
    torch.testing.assert_close(decoder("adaptive:theta=0.6,temperature=1.4").distribution(s), expected)
    torch.testing.assert_close(decoder("adaptive:theta=0").distribution(s), torch.softmax(s, -1))
    sure = torch.tensor([500.0, 0.0, -500.0])  # no entropy left at all
    assert decoder("adaptive").distribution(sure).tolist() == [1, 0, 0]


@pytest.mark.parametrize("lam", [0.05, 1.0, 30.0])
def test_js_by_dual_root_is_js_by_mirror_ascent(lam):
    s = rows(12, 2.0)[:20]
    d = decoder(f"js:lam={lam},temperature=1.5")
    problem = d.problem(s)
    q = d.distribution(s)
    assert (certify(problem, q).gap < 1e-9).all()
    climbed = solve(problem, MirrorAscent(tolerance=1e-10, max_steps=20_000))
    torch.testing.assert_close(q, climbed, atol=2e-5, rtol=0)
    assert (problem.objective(q) >= problem.objective(climbed) - 1e-9).all()


def test_js_is_the_divergence_it_is_named_after():
    q, r = (torch.softmax(torch.randn(5, 9, generator=torch.Generator().manual_seed(i)).double(), -1) for i in (1, 2))
    mean = (q + r) / 2
    kl = lambda a: (a * (a / mean).log()).sum(-1)  # noqa: E731
    omega = sx.JS.to(r)
    torch.testing.assert_close(omega.value(q), (kl(q) + kl(r)) / 2)
    torch.testing.assert_close(omega.grad(q), sx.Regulariser.grad(omega, q), atol=1e-12, rtol=0)
    torch.testing.assert_close(omega.inverse_grad(omega.grad(q)), q)
    one = torch.eye(9)[0].double()
    assert (omega.value(one.expand(5, 9)) < torch.tensor(2.0).log()).all()
    banned = sx.JS.to(torch.tensor([0.5, 0.5, 0.0]).double())
    assert solve(Problem(torch.tensor([0.0, 0.0, 9.0]).double(), banned)).tolist() == [0.5, 0.5, 0]


def test_the_frontier_pays_for_tokens_a_little_below_the_best():
    from simplexity.anchor import Anchor
    from simplexity.decoders.best_of_k import token_weights

    s = torch.tensor([[3.0, 2.0, 0.0, -INF]]).double()
    w = token_weights("frontier", 8, Anchor(s, 2.0))
    gap = torch.tensor([0.0, 1.0, 3.0]).double()
    torch.testing.assert_close(w[0, :3], gap * torch.exp(-gap / 2))
    assert w[0, 3] == 0
    near = decoder("bok:weights=frontier,solver=exact,beta=4,lam=1,temperature=1")
    flat = decoder("bok:beta=0,solver=exact,lam=1,temperature=1")
    assert (near.certify(s).gap < 1e-9).all()
    assert near.distribution(s)[0, 1] > 1.5 * flat.distribution(s)[0, 1]
    assert near.distribution(s)[0, 0] < flat.distribution(s)[0, 0]
    # w reaches τ/e: a step of 1 that would overshoot is shortened
    hot = decoder("bok:weights=frontier,temperature=30,beta=3,lam=0.5,k=64,steps=400")
    assert (hot.certify(30 * s).gap < 1e-6).all()


# What is written and drawn from the code


def test_the_reference_of_decoders_is_up_to_date():
    from simplexity.show.reference import built_in, reference

    written = (Path(__file__).parent.parent / "docs" / "decoders.md").read_text()
    assert written == reference(built_in()), "run: python -m simplexity.show.reference > docs/decoders.md"
    for name, kind in built_in().items():
        section = written.split(f"## `{name}`\n")[1].split("\n## ")[0]
        assert kind.objective in section
        assert all(f"| `{f.name}` |" in section for f in kind.parameters() if not f.kw_only)


def test_the_gallery_draws_every_decoder(tmp_path):
    from simplexity.show.figures import save
    from simplexity.show.gallery import SPECS, gallery
    from simplexity.show.reference import built_in

    made = [decoder(spec) for spec in SPECS]
    assert {d.name for d in made} == set(built_in())
    s = rows(30, 2.0)[0].sort(descending=True).values
    around = Context(other=torch.zeros(30), rewards=torch.ones(30))
    save(gallery(SPECS, s, [f"t{i}" for i in range(30)], around, "all"), tmp_path / "all.svg")
    drawn = (tmp_path / "all.svg").read_text()
    assert all(str(d) in drawn for d in made)


def test_the_page_on_choosing_names_every_decoder():
    page = (Path(__file__).parent.parent / "docs" / "how-to-choose.md").read_text()
    specs = re.findall(r"`([a-z][a-z-]*(?::[^`]+=[^`]+)?)`", page)
    named = {spec.partition(":")[0] for spec in specs}
    assert set(sx.decoders()) <= named | {
        n for n, k in sx.decoders().items() if not k.__module__.startswith("simplexity.")
    }
    for spec in specs:
        if ":" in spec:
            decoder(spec)
