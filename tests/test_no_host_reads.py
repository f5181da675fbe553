"""`validate=False` must never look at a value: on a GPU each look stalls the stream, and a graph cannot be captured."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import ready
from simplexity import Allowed, Banned, Context, HalfSquare, NegEntropy, Problem, Then, TopK, TopP, decoder, solve
from test_contract import SPECS

# Operators whose result, or whose shape of result, is only known by looking at the data.
READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "is_nonzero", "equal", "index.Tensor")


class NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        looked = any(read in name for read in READS)
        if looked and not (
            "index.Tensor" in name and not any(i is not None and i.dtype == torch.bool for i in args[1])
        ):
            raise AssertionError(f"{name} reads values on the host")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("spec", [*SPECS, "softmax:entropy=1.5", "bok:effective_temperature=0.15"])
def test_decoders(spec):
    scores, d = torch.randn(4, 700), ready(spec)
    with NoReads():
        d.distribution(scores, validate=False)
        d.sample(scores, seeds=torch.arange(4), step=3, validate=False)
        d.sample(scores, seeds=torch.arange(4), step=torch.arange(4), validate=False)
        d.mode(scores, validate=False, context=Context(mask=torch.ones(4, 700, dtype=torch.bool)))


@pytest.mark.parametrize("name", ["top-k", "top-p", "bok", "entmax", "sparsemax", "kl"])
def test_parameters_per_row(name):
    rows = {"top-k": {"k": torch.tensor([1, 2, 3, 800])}, "top-p": {"p": torch.tensor([0.1, 0.5, 0.9, 1.0])}}
    lam = {"lam": torch.tensor([0.0, 0.1, 0.5, 1.0])}
    d = decoder({"decoder": name, **rows.get(name, lam)})
    scores = torch.randn(4, 700)
    with NoReads():
        q, status = d.distribution(scores, validate=False)
    assert (status == 0).all()
    torch.testing.assert_close(q, d.distribution(scores), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "support", [Allowed(torch.tensor([[1], [2], [3], [4]])), Then(TopK(9), TopP(0.5)), Banned([0])]
)
def test_supports(support):
    problem = Problem(torch.randn(4, 700), NegEntropy(), support=support)
    with NoReads():
        solve(problem, validate=False)


def test_the_guard_itself_notices():
    with pytest.raises(AssertionError, match="reads values"), NoReads():
        decoder("softmax").distribution(torch.randn(4, 700))


class CountReads(TorchDispatchMode):
    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += any(read in str(func) for read in READS[:3])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["greedy", "softmax", "kl"])
def test_validation_is_one_read(name, dtype):
    # decoders that cut columns away look again on a CPU, where looking is free; these have nothing to cut
    with CountReads() as count:
        decoder(name).distribution(torch.randn(4, 700, dtype=dtype))
    assert count.reads == 1


class CountCalls(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize(
    "spec", ["greedy", "softmax", "sparsemax", "entmax", "kl", "kl:lam=3,temperature=2", "top-k:k=5"]
)
def test_more_rows_take_no_more_calls(spec, validate):
    # too short to be cut to columns by looking, or to be taken a few at a time, as rows that fill the cache are
    d, scores, counts = decoder(spec), torch.randn(64, 300), []
    for rows in (2, 64):
        with CountCalls() as count:
            d.distribution(scores[:rows], validate=validate)
        counts.append(count.calls)
    assert counts[0] == counts[1] > 0


def test_numbers_of_a_sum_are_not_copied_to_the_device(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a number becomes a tensor, which on a GPU is a copy from the host")

    problem = Problem(torch.randn(4, 50), NegEntropy() + 0.5 * HalfSquare())
    for name in ("tensor", "as_tensor", "scalar_tensor"):
        monkeypatch.setattr(torch, name, refuse)
    solve(problem, validate=False)
