"""Supports, contexts, per-row parameters, users' own regularisers, and the shape of the package."""

import ast
import json
import pkgutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import simplexity as sx
from simplexity import (
    KL,
    Allowed,
    Banned,
    Context,
    Coverage,
    MirrorAscent,
    NegEntropy,
    Problem,
    Then,
    TopK,
    TopP,
    decoder,
    solve,
)
from simplexity.anchor import Anchor
from simplexity.decoders.best_of_k import token_weights

SRC = Path(sx.__file__).parent


def test_parameters_per_row_are_those_of_each_row():
    s = 3 * torch.randn(3, 50).double()
    cases = {
        "softmax": {"temperature": [0.5, 1.0, 2.0]},
        "top-k": {"k": [1, 5, 80]},
        "top-p": {"p": [0.2, 0.9, 1.0], "temperature": [0.5, 1.0, 2.0]},
        "sparsemax": {"lam": [0.0, 1.0, 9.0]},
        "entmax": {"alpha": [1.2, 1.5, 3.0], "lam": [0.0, 1.0, 9.0]},
        "kl": {"lam": [0.1, 1.0, 9.0]},
        "bok": {"k": [1, 8, 64], "beta": [0.0, 1.0, 9.0], "lam": [0.1, 0.2, 0.5], "temperature": [0.5, 1.0, 2.0]},
    }
    for name, values in cases.items():
        for extra in [{}, {"solver": "exact"}] if name == "bok" else [{}]:
            together = decoder({"decoder": name, **values, **extra}).distribution(s)
            for i in range(3):
                alone = decoder({"decoder": name, **{k: v[i] for k, v in values.items()}, **extra})
                torch.testing.assert_close(together[i], alone.distribution(s[i]), atol=1e-10, rtol=0)


@pytest.mark.parametrize("weights", ["rank", "top-m", "probs"])
@pytest.mark.parametrize("solver", ["mirror", "exact"])
def test_m_may_be_one_per_row(weights, solver):
    s, values = 3 * torch.randn(3, 90), {"decoder": "bok", "weights": weights, "solver": solver, "beta": 3.0}
    d, each = decoder({**values, "m": [1, 2, 8]}), [decoder({**values, "m": m}) for m in (1, 2, 8)]
    q = torch.stack([alone.distribution(row) for alone, row in zip(each, s, strict=True)])
    torch.testing.assert_close(d.distribution(s), q, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(d.distribution(s, validate=False)[0], q, atol=1e-6, rtol=1e-5)
    drawn = [alone.sample(row, seeds=seed) for alone, row, seed in zip(each, s, (4, 5, 6), strict=True)]
    assert d.sample(s, seeds=[4, 5, 6]).tolist() == [int(token) for token in drawn]


def test_a_parameter_may_stand_in_a_column():
    s = torch.randn(2, 3, 5)
    rows = torch.rand(2, 3) + 0.5
    flat = decoder({"decoder": "softmax", "temperature": rows}).distribution(s)
    torch.testing.assert_close(decoder({"decoder": "softmax", "temperature": rows.unsqueeze(-1)}).distribution(s), flat)
    assert "tensor" in str(decoder({"decoder": "softmax", "temperature": rows}))


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), Fraction(1, 2), torch.tensor(0.5)])
def test_numbers_of_any_kind_become_plain_ones(number):
    for d in (decoder({"decoder": "top-p", "p": number}), decoder({"decoder": "top-k", "k": 6 * number})):
        assert decoder(json.loads(json.dumps(d.to_json()))) == d == decoder(str(d))
    assert json.dumps(decoder({"decoder": "top-k", "k": np.int64(3)}).to_json())
    assert json.dumps(decoder({"decoder": "bounded", "groups": [[0]], "lower": [np.float32(0.5)]}).to_json())


def test_decoders_with_tensors_can_be_compared():
    one, same, other = (decoder({"decoder": "top-p", "p": p}) for p in ([0.1, 0.2], [0.1, 0.2], [0.1, 0.3]))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != decoder("top-p:p=0.1")
    assert decoder("top-p") != decoder("top-k")
    assert decoder(one.to_json()) == one
    assert len({one, same, other, decoder("top-p"), decoder("top-p")}) == 3


@pytest.mark.parametrize("scale", [1e-31, 1e25])
def test_a_target_is_reached_whatever_the_size_of_the_scores(scale):
    s = scale * torch.tensor([0.0, 1.0, 2.0]).double()
    if scale < 1e-30:  # no temperature is that small
        with pytest.raises(ValueError, match="the target cannot be reached"):
            decoder("softmax:entropy=0.5").distribution(s)
        return
    torch.testing.assert_close(sx.entropy(decoder("softmax:entropy=0.5").distribution(s)).item(), 0.5)


def test_k_above_the_vocabulary_keeps_everything():
    s = torch.randn(2, 6)
    torch.testing.assert_close(decoder("top-k:k=500").distribution(s), decoder("softmax").distribution(s))


def test_ties_at_the_cut_keep_the_lowest_ids():
    s = torch.tensor([2.0, 1.0, 1.0, 1.0])
    assert (decoder("top-k:k=2").distribution(s) > 0).tolist() == [True, True, False, False]
    assert (decoder("top-p:p=0.6").distribution(s) > 0).tolist() == [True, True, False, False]
    assert decoder("greedy").sample(torch.tensor([1.0, 3.0, 3.0])) == 1
    wide = torch.zeros(1, 4_000)
    assert (decoder("top-k:k=7").distribution(wide) > 0).nonzero()[:, 1].tolist() == list(range(7))
    assert (decoder("top-p:p=0.01").distribution(wide) > 0).nonzero()[:, 1].tolist() == list(range(40))


def test_supports_per_row_and_in_turn():
    s = torch.tensor([[3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0]])
    assert Allowed([[0, 3], [1]]).mask(s).tolist() == [[True, False, False, True], [False, True, False, False]]
    assert Banned(torch.tensor([[0, -1], [1, 2]])).mask(s).tolist() == [
        [False, True, True, True],
        [True, False, False, True],
    ]
    chain = Banned([0]).then(TopK(2)).then(TopP(0.5))
    assert chain.mask(s).tolist() == [[False, True, False, False]] * 2
    q = solve(Problem(s, NegEntropy(), support=Then(Banned([0]), TopK(2))))
    torch.testing.assert_close(q[0], torch.tensor([0.0, 0.7311, 0.2689, 0.0]), atol=1e-4, rtol=0)
    # a forbidden best score must not cost the others their digits
    far = torch.tensor([[1e7, 2.0, 1.0]])
    q = solve(Problem(far, NegEntropy(), support=Banned([0])))
    torch.testing.assert_close(q, torch.tensor([[0.0, 0.7311, 0.2689]]), atol=1e-4, rtol=0)


def test_the_context_brings_a_mask_and_another_model():
    s, other = torch.randn(2, 30), torch.randn(2, 30)
    mask = torch.rand(2, 30) < 0.5
    q = decoder("top-k:k=5").distribution(s, Context(mask=mask))
    assert (q[~mask] == 0).all()
    anchored = decoder("kl:lam=0.5,temperature=2").distribution(s, Context(other=other))
    torch.testing.assert_close(anchored, torch.softmax(s / 0.5 + other / 2, -1))
    torch.testing.assert_close(decoder("kl").distribution(s), torch.softmax(2 * s, -1))


def test_a_reference_of_zero_forbids_a_token():
    r = torch.tensor([[0.5, 0.5, 0.0]])
    for solver in ("closed-form", "dual-root"):
        q = solve(Problem(torch.tensor([[0.0, 1.0, 50.0]]), KL.to(r)), solver)
        torch.testing.assert_close(q, torch.tensor([[0.2689, 0.7311, 0.0]]), atol=1e-4, rtol=0)


def test_weights_of_best_of_k():
    s = torch.tensor([[1.0, 3.0, 2.0, 2.0]])
    anchor = Anchor(s, 1.0)
    assert token_weights("uniform", 8, anchor) == 1.0
    torch.testing.assert_close(token_weights("top-m", 2, anchor), torch.tensor([[0.0, 1.0, 1.0, 0.0]]))
    torch.testing.assert_close(token_weights("rank", 1, anchor), torch.tensor([[0.125, 1.0, 0.5, 0.25]]))
    torch.testing.assert_close(token_weights("probs", 8, anchor), torch.softmax(s, -1))
    own = decoder({"decoder": "bok", "weights": lambda scores: (scores > 1.5).float(), "solver": "exact", "beta": 5.0})
    top = decoder("bok:weights=top-m,m=3,solver=exact,beta=5")
    torch.testing.assert_close(own.distribution(s), top.distribution(s))


class Pull:
    """A user's Ω that is neither separable nor in the library: ½(Σ v·q − target)², plus an entropy."""

    def __init__(self, target):
        self.target = target

    def value(self, q):
        ids = torch.arange(q.shape[-1], dtype=q.dtype)
        return 0.5 * ((ids * q).sum(-1) - self.target).square() + torch.xlogy(q, q).sum(-1)


def test_a_users_own_regulariser_end_to_end():
    s = torch.randn(3, 12).double()
    problem = Problem(s, Pull(4.0), lam=0.5, support=TopK(8))  # pyright: ignore
    q = solve(problem)
    certificate = sx.certify(problem, q)
    assert (certificate.gap < 1e-9).all()
    assert sx.draw(q, seeds=[1, 2, 3]).shape == (3,)
    with torch.inference_mode():  # as inside an engine
        torch.testing.assert_close(solve(problem), q)
    q32, status = solve(
        Problem(s.float(), Pull(4.0), lam=0.5, support=TopK(8)), MirrorAscent(max_steps=60), validate=False
    )  # pyright: ignore
    assert (status == 0).all()
    torch.testing.assert_close(q32, q.float(), atol=1e-3, rtol=0)


def test_a_users_own_separable_regulariser_is_solved_exactly():
    class Cube(sx.Regulariser):
        separable = True

        def value(self, q):
            return (q**3).sum(-1)

    s = torch.randn(3, 9).double()
    problem = Problem(s, Cube(), lam=2.0)
    assert (sx.certify(problem, solve(problem, "dual-root")).gap < 1e-9).all()
    mixed = Problem(s, Cube() + 0.3 * NegEntropy() + Coverage(3, 0.5), lam=2.0)
    assert (sx.certify(mixed, solve(mixed, "dual-root")).gap < 1e-9).all()


def test_what_a_plain_object_brings_is_used():
    class Brings(Pull):
        used = 0

        def smoothness(self, geometry):
            self.used += 1

    omega = Brings(2.0)
    solve(Problem(torch.randn(1, 5).double(), omega))  # pyright: ignore
    assert omega.used


def test_the_context_may_bring_seeds_and_step():
    s, d = torch.randn(4, 50), decoder("softmax")
    seeds = torch.arange(4)
    assert (d.sample(s, context=Context(seeds=seeds, step=3)) == d.sample(s, seeds=seeds, step=3)).all()


def test_tensors_of_another_precision_do_not_leak_into_q():
    s = torch.randn(2, 600)
    for omega in (
        KL(torch.randn(2, 600).double()) + Coverage(4, torch.rand(2, 600).double()),
        KL(torch.randn(2, 600).double()),
    ):
        assert solve(Problem(s, omega)).dtype == torch.float32
        assert solve(Problem(s, omega), MirrorAscent(steps=3, start="reference")).dtype == torch.float32
    assert decoder({"decoder": "entmax", "alpha": [1.0, 1.7]}).distribution(s).dtype == torch.float32


def test_warm_start_saves_steps():
    problem = Problem(torch.randn(1, 40).double(), Pull(4.0))  # pyright: ignore
    q = solve(problem)
    again = solve(problem, MirrorAscent(start=q, max_steps=2, tolerance=1e-8))
    assert sx.certify(problem, again).gap < 1e-8


@settings(max_examples=150, deadline=None)
@given(
    scores=arrays("float32", (2, 6), elements=st.floats(-1e4, 1e4, width=32) | st.just(-float("inf"))),
    spec=st.sampled_from(
        ["greedy", "softmax:temperature=0.2", "top-p:p=0.6", "sparsemax", "entmax", "bok", "bok:solver=exact,beta=3"]
    ),
)
def test_any_scores_with_a_finite_one_give_a_distribution(scores, spec):
    s = torch.from_numpy(scores.copy())
    s[:, 3] = s[:, 3].clamp_min(-1e4)
    q = decoder(spec).distribution(s)
    assert torch.isfinite(q).all()
    assert (q >= 0).all()
    assert (q.double().sum(-1) - 1).abs().max() < 1e-6
    assert (q[s == -float("inf")] == 0).all()


def test_the_public_names_are_the_public_names():
    public = {n for n in vars(sx) if not n.startswith("_") and not isinstance(vars(sx)[n], type(sys))}
    assert public == set(sx.__all__)


def test_import_needs_torch_alone():
    code = "import sys, simplexity; assert not {'transformers', 'triton', 'numpy.testing', 'typer'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


LAYERS = [
    {"rows", "context", "roots", "coverage", "groups", "files", "embedded", "siblings", "parameters"},
    {"narrow", "nucleus", "regularisers", "constraints", "supports", "cuts", "penalties", "draw", "measures"},
    {"problem", "structure", "anchor", "coupling"},
    {"certificate", "solvers"},
    {"kernels"},
    {"targets", "specs", "decoding"},
    {"decoders", "masks"},
    {"explaining", "models", "engines", "options"},
    {"comparing", "spending"},
    {"show"},
    {"evaluation", "inputs"},
    {"cli"},
]


def test_imports_point_one_way():
    level = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    modules = {m.name for m in pkgutil.iter_modules([str(SRC)])}
    assert modules == set(level), "a new module needs a place in LAYERS"
    for path in SRC.rglob("*.py"):
        here = path.relative_to(SRC).parts[0].removesuffix(".py")
        if here == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("simplexity"):
                names = [node.module.split(".")[1]] if "." in node.module else [a.name for a in node.names]
            for name in set(names) & set(level):
                assert level[name] <= level[here], f"{path.name} ({here}) imports {name}, which lies above it"


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda path: str(path.relative_to(SRC)))
def test_every_module_opens_with_a_sentence(path):
    assert ast.get_docstring(ast.parse(path.read_text()))
