"""The Triton kernels against the float64 reference: in Triton's interpreter without a GPU, in full on one.

On a GPU: `make test-gpu`. The interpreter is slow, so vocabularies, tiles and groups are small there.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

GPU = torch.cuda.is_available()
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from simplexity import Codes, Context, decoder, effective_temperature, entropy  # noqa: E402
from simplexity.draw import uniform  # noqa: E402
from simplexity.kernels import gpu, gpu_codes, gpu_sweep, log_q_on_gpu, swept_rows  # noqa: E402
from simplexity.kernels.gpu_head import nucleus  # noqa: E402
from simplexity.kernels.gpu_moments import MomentsOnGPU  # noqa: E402
from simplexity.kernels.plans import plan_for  # noqa: E402
from simplexity.siblings import Siblings  # noqa: E402

# the interpreter computes with numpy, which remarks on log 0 and inf − inf
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if GPU else "cpu"
SIZES = [1, 111, 32_003, 151_936] if GPU else [1, 111, 300]
LARGE = [] if GPU else [pytest.param(SIZES.pop(), marks=pytest.mark.slow)]  # the interpreter takes its time
SPECS = [
    "softmax:temperature=0.7",
    "top-k:k=20,temperature=0.7",
    "top-p:p=0.9,temperature=0.8",
    "top-p:p=0.8,temperature=0.6,temperature_last=true",
    "min-p:p=0.05,temperature=0.7",
    "min-p:p=0.2,temperature=1.5,temperature_last=true",
    "min-p:p=0",
    "sparsemax:lam=0.8",
    "entmax",
    "kl:lam=0.9,temperature=0.8",
    "bok",
    "bok:temperature=0.7,k=16,beta=2,lam=0.2,weights=top-m,m=5",
    "bok:beta=0.5,weights=uniform,step=0.7,steps=3",
    "bok:beta=20,k=64,lam=0.5",
    "bok:beta=0,lam=0.5",
    "bok:solver=exact",
    "bok:solver=exact,beta=3,k=32,temperature=0.8,weights=top-m",
    "bok:solver=exact,beta=1,lam=2,weights=uniform",
    "bok:solver=exact,k=1,beta=0.5,lam=1",
]

WHOLE = dict(gpu.NARROW)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    if not GPU:
        for name, value in {"TILE": 128, "GROUP": 8, "GROUPS": 8}.items():
            monkeypatch.setattr(gpu, name, value)
        monkeypatch.setattr(gpu, "NARROW", {kind: (4, min(packed, 16)) for kind, (_, packed) in gpu.NARROW.items()})


def awkward(size: int) -> torch.Tensor:
    """Peaked, flat, tied, masked, constant and adversarial rows, and one with a single token."""
    g = torch.Generator().manual_seed(size)
    x = torch.randn(7, size, generator=g)
    x[0] *= 8
    x[1] *= 0.3
    x[1, 3::7] = torch.finfo(x.dtype).min  # what some mask with
    x[2] = x[2].round()
    x[3, size // 2 + 1 :] = -torch.inf
    x[4] = 2.5
    x[5] = 1e4 + 30 * x[5]
    x[6, 1:] = -torch.inf
    return x


def plan_of(spec: str):
    chosen = decoder(spec)
    problem = chosen.problem(torch.zeros(1, 1))
    plan = plan_for(problem, chosen.method(problem))
    assert plan is not None
    return plan


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("size", [*SIZES, *LARGE])
def test_q_and_draws_are_those_of_the_reference(spec, size):
    x = awkward(size)[:: 1 if GPU or size == 111 else 2]
    q = decoder(spec).distribution(x.double())
    plan, on_device = plan_of(spec), x.to(DEVICE)
    written, drawn = gpu.fused_distribution(on_device, plan)
    written = written.cpu()
    assert not drawn.status.any()
    assert 0.5 * (written.double() - q).abs().sum(-1).max() < 1e-5
    same_support(spec, x, written, q)
    ends = q.cumsum(-1)
    for step in range(3 if GPU else 1):
        seeds = torch.arange(len(x)) + 10 * step
        u = uniform(seeds, step)
        found = gpu.fused_draw(on_device, plan, seeds.to(DEVICE), step)
        tokens = found.tokens.cpu().unsqueeze(-1)
        mass = q.gather(-1, tokens).squeeze(-1)
        high = ends.gather(-1, tokens).squeeze(-1)
        assert bool(((u >= high - mass - 3e-6) & (u <= high + 3e-6)).all())
        torch.testing.assert_close(found.log_q.cpu().double(), mass.log(), atol=1e-4, rtol=1e-4)


def same_support(spec: str, x: torch.Tensor, written: torch.Tensor, q: torch.Tensor) -> None:
    """No token more and none fewer than in q, but for those that weigh nothing; top-p may go by rounding at its p."""
    extra, missing = (written > 0) & (q == 0), (written == 0) & (q > 1e-37)
    chosen = decoder(spec)
    if chosen.name == "top-p":
        tau = 1.0 if chosen.temperature_last else chosen.temperature
        mass = torch.softmax(x.double() / tau, -1).sort(-1, descending=True).values.cumsum(-1)
        clear = (mass - chosen.p).abs().amin(-1) > 1e-6
        assert not (extra | missing)[clear].any()
    elif chosen.name in ("top-k", "min-p"):
        assert not (extra | missing).any()
    else:
        assert (written[extra] < 1e-6).all()
        assert (q[missing] < 1e-6).all()


@pytest.mark.parametrize("spec", SPECS if GPU else ["softmax", "top-p:p=0.7", "bok"])
def test_log_q_in_place_and_numbers_given(spec):
    x, plan = awkward(SIZES[-1])[:4].to(DEVICE), plan_of(spec)
    written, _ = gpu.fused_distribution(x, plan)
    seeds = torch.arange(4)
    found = gpu.fused_draw(x, plan, seeds.to(DEVICE), 3)
    given = gpu.fused_draw(x, plan, uniforms=uniform(seeds, 3).to(DEVICE))
    assert torch.equal(given.tokens, found.tokens)
    logs, _ = gpu.fused_distribution(x, plan, log=True, out=x)
    assert logs is x
    torch.testing.assert_close(logs.exp(), written, atol=1e-6, rtol=1e-4)


def test_a_row_that_cannot_be_solved_stays_as_it_is_in_place():
    x = awkward(SIZES[-1])[:3].to(DEVICE)
    x[1, 5] = torch.nan
    before, alone = x.clone(), gpu.fused_distribution(x[[0, 2]].contiguous(), plan_of("softmax"), log=True)[0]
    found, status = log_q_on_gpu(x, plan_of("softmax"), out=x)
    assert found.data_ptr() == x.data_ptr()
    assert status.tolist() == [0, 1, 0]
    torch.testing.assert_close(x[1], before[1], equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(x[[0, 2]], alone, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", SPECS if GPU else ["softmax", "top-p:p=0.7"])
def test_half_precision(spec, dtype):
    x = (3 * torch.randn(3, SIZES[-1], generator=torch.Generator().manual_seed(0))).to(dtype)
    written, _ = gpu.fused_distribution(x.to(DEVICE), plan_of(spec))
    q = decoder(spec).distribution(x.double())
    assert 0.5 * (written.cpu().double() - q).abs().sum(-1).max() < 1e-5
    same_support(spec, x, written.cpu(), q)
    seeds = torch.arange(3)
    found = gpu.fused_draw(x.to(DEVICE), plan_of(spec), seeds.to(DEVICE)).tokens.cpu()
    high = q.cumsum(-1).gather(-1, found.unsqueeze(-1)).squeeze(-1)
    mass = q.gather(-1, found.unsqueeze(-1)).squeeze(-1)
    assert bool(((uniform(seeds) >= high - mass - 3e-6) & (uniform(seeds) <= high + 3e-6)).all())


def test_parameters_per_row():
    x = awkward(SIZES[-1])[:3]
    rows = {"temperature": [0.5, 1.0, 2.0], "p": [0.3, 0.9, 1.0], "k": [1, 7, 10**6]}
    for name, more in {"softmax": [], "top-p": ["p"], "min-p": ["p"], "top-k": ["k"]}.items():
        fields = ["temperature", *more]
        mixed = decoder({"decoder": name, **{f: rows[f] for f in fields}})
        problem = mixed._with({f: torch.tensor(rows[f]).unsqueeze(-1) for f in fields}).problem(torch.zeros(3, 1))
        plan = plan_for(problem, None)
        assert plan is not None
        written, _ = gpu.fused_distribution(x.to(DEVICE), plan.expand(torch.Size([3])))
        assert 0.5 * (written.cpu().double() - mixed.distribution(x.double())).abs().sum(-1).max() < 1e-5


def test_rows_that_cannot_be_solved():
    x = awkward(SIZES[1] if GPU else 40).to(DEVICE)
    x[0, 5], x[1, 7], x[2] = torch.nan, torch.inf, -torch.inf
    x[1, 3] = -torch.inf
    for spec in SPECS:
        found = gpu.fused_draw(x, plan_of(spec), torch.arange(len(x), device=DEVICE))
        assert found.status.tolist() == [1, 2, 3, 0, 0, 0, 0]
        assert found.tokens[:3].tolist() == [-1, -1, -1]
        assert (found.tokens[3:] >= 0).all()
        written, _ = gpu.fused_distribution(x, plan_of(spec))
        assert written[:3].sum() == 0


@pytest.mark.parametrize("spec", ["bok:beta=20,k=64,lam=0.5", "bok:solver=exact,beta=3,k=32,weights=top-m"])
def test_strong_coverage_on_a_head_that_holds_everything(monkeypatch, spec):
    monkeypatch.setattr(gpu, "GROUPS", 128)
    x = awkward(60)
    written, drawn = gpu.fused_distribution(x.to(DEVICE), plan_of(spec))
    assert not drawn.swept.any()
    assert 0.5 * (written.cpu().double() - decoder(spec).distribution(x.double())).abs().sum(-1).max() < 1e-5


@pytest.mark.parametrize("spec", ["bok", "bok:temperature=0.8", "bok:solver=exact,beta=1,lam=0.5"])
def test_rows_as_a_model_has_them_are_solved_from_their_head(monkeypatch, spec):
    """Scores that fall with the logarithm of the rank: all of the vocabulary weighs a little at first."""
    for name, value in {"TILE": 4096, "GROUP": 64, "GROUPS": 128, "NARROW": WHOLE}.items():
        monkeypatch.setattr(gpu, name, value)
    steep, bend = torch.tensor([[1.8], [2.2]]), torch.tensor([[0.3], [3.0]])
    x = -steep * torch.log1p(torch.arange(32_768) / bend)
    x = x[:, torch.randperm(32_768, generator=torch.Generator().manual_seed(0))]
    written, drawn = gpu.fused_distribution(x.to(DEVICE), plan_of(spec))
    assert not drawn.swept.any()
    assert 0.5 * (written.cpu().double() - decoder(spec).distribution(x.double())).abs().sum(-1).max() < 1e-5


@pytest.mark.parametrize(
    "spec", ["bok:temperature=0.8", "bok:k=3,beta=0.2", "bok:k=4,beta=2,lam=0.5,weights=top-m,m=3", "bok:k=1,beta=1"]
)
@pytest.mark.parametrize("shape", ["heavy tails", "flat"])
def test_what_a_head_lacks_is_swept_once_a_step(monkeypatch, spec, shape):
    for name, value in {"TILE": 4096, "GROUP": 64, "GROUPS": 128, "NARROW": WHOLE}.items():
        monkeypatch.setattr(gpu, name, value)
    size, g = 32_768, torch.Generator().manual_seed(3)
    x = torch.randn(2, size, generator=g)
    if shape == "heavy tails":
        x = -torch.tensor([[1.4], [1.7]]) * torch.log1p(torch.arange(size) / 10.0)
        x = x[:, torch.randperm(size, generator=g)]
    if not GPU:  # the interpreter calls what it finds; compiled kernels do not
        monkeypatch.setattr(gpu_sweep, "sweep_climb", None)
    q = decoder(spec).distribution(x.double())
    written, drawn = gpu.fused_distribution(x.to(DEVICE), plan_of(spec))
    assert 0.5 * (written.cpu().double() - q).abs().sum(-1).max() < 1e-5
    assert drawn.swept.all()
    u = torch.tensor([0.3, 0.9999], dtype=torch.float64)
    found = gpu.fused_draw(x.to(DEVICE), plan_of(spec), uniforms=u.to(DEVICE))
    tokens = found.tokens.cpu().unsqueeze(-1)
    mass, high = q.gather(-1, tokens).squeeze(-1), q.cumsum(-1).gather(-1, tokens).squeeze(-1)
    assert bool(((u >= high - mass - 3e-6) & (u <= high + 3e-6)).all())
    torch.testing.assert_close(found.log_q.cpu().double(), mass.log(), atol=1e-4, rtol=1e-4)


def test_a_reward_may_outweigh_a_low_score(monkeypatch):
    """Tokens that weigh nothing after the first step and a little after the last."""
    for name, value in {"TILE": 4096, "GROUP": 64, "GROUPS": 128, "NARROW": WHOLE}.items():
        monkeypatch.setattr(gpu, name, value)
    x = 0.3 * torch.randn(1, 32_768, generator=torch.Generator().manual_seed(5)) - 17
    x[0, 77], spec = 0.0, "bok:beta=5,k=256,lam=1,temperature=0.5,weights=uniform"
    written, _ = gpu.fused_distribution(x.to(DEVICE), plan_of(spec))
    assert 0.5 * (written.cpu().double() - decoder(spec).distribution(x.double())).abs().sum() < 1e-6


@triton.jit
def edge(scores, needed, cut, last, size: tl.constexpr):
    lane = tl.arange(0, size)
    h = tl.load(scores + lane)
    found, tie = nucleus(h, lane, tl.exp(h).to(tl.float64), tl.load(needed), tl.min(h) - 1.0, tl.max(h))
    tl.store(cut, found)
    tl.store(last, tie)


def test_a_nucleus_that_lacks_a_rounding_is_everything():
    """What lies between two cuts was summed in another precision, and may hold a little less than is needed."""
    x = torch.tensor([0.0, -1.0, -1.0, -2.0, -3.0, -3.0, -4.0, -4.0], device=DEVICE)
    cut, last, whole = torch.zeros(1, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE), x.exp().double()
    run: Any = edge
    for needed, expected in [(whole.sum() * (1 + 1e-9), (-4.0, 7)), (whole[:4].sum() - 0.01, (-2.0, 3))]:
        run[(1,)](x, needed.view(1), cut, last, size=8)
        assert (cut.item(), last.item()) == expected


@pytest.mark.parametrize("spec", ["top-p:p=0.95,temperature=2", "top-k:k=1500", "bok:weights=top-m,m=900,beta=1"])
def test_a_cut_is_found_in_few_sweeps(monkeypatch, spec):
    for name, value in {"TILE": 1024, "GROUP": 16, "GROUPS": 32}.items():
        monkeypatch.setattr(gpu, name, value)
    sweeps, narrowed = [], gpu_sweep.narrowed
    if not GPU:  # the interpreter calls what it finds; compiled kernels do not
        monkeypatch.setattr(gpu_sweep, "narrowed", lambda *given: sweeps.append(1) or narrowed(*given))
    x = torch.randn(6, 2500, generator=torch.Generator().manual_seed(2))
    x[1] = x[1].bfloat16().float()
    x[2] = x[2].round()  # more ties than can be written down
    x[3, ::3] = torch.finfo(x.dtype).min
    x[4] += 1e4
    x[5, 1::5] = -torch.inf
    q = decoder(spec).distribution(x.double())
    for own, row in zip(q, x, strict=True):
        sweeps.clear()
        written, drawn = gpu.fused_distribution(row.unsqueeze(0).to(DEVICE), plan_of(spec))
        written = written.cpu()
        assert bool(drawn.swept)
        assert 0.5 * (written.double() - own).abs().sum() < 1e-5
        same_support(spec, row.unsqueeze(0), written, own.unsqueeze(0))
        assert GPU or 3 <= len(sweeps) <= 8


def test_steps_that_overshoot_are_not_solved_from_a_head():
    """With step·λ near 2 the reward of the best token comes out negative, and others outweigh it."""
    spec = "bok:lam=0.02,step=95,steps=2,k=2,beta=15.8,weights=top-m,m=1"
    x = torch.full((1, 1000), -3.3)
    x[0, :56] = -3.0
    x[0, 5] = 0.0
    written, _ = gpu.fused_distribution(x.to(DEVICE), plan_of(spec))
    assert 0.5 * (written.cpu().double() - decoder(spec).distribution(x.double())).abs().sum() < 1e-5


def test_coverage_by_rows():
    x = awkward(SIZES[-1])[:3]
    rows = {"temperature": [0.5, 1.0, 2.0], "k": [1, 7, 30], "beta": [0.1, 1.0, 5.0], "lam": [0.0, 0.3, 1.0]}
    mixed = decoder({"decoder": "bok", **rows})
    problem = mixed._with({f: torch.tensor(v).unsqueeze(-1) for f, v in rows.items()}).problem(torch.zeros(3, 1))
    plan = plan_for(problem, mixed.method(problem))
    assert plan is not None
    written, _ = gpu.fused_distribution(x.to(DEVICE), plan.expand(torch.Size([3])))
    assert 0.5 * (written.cpu().double() - mixed.distribution(x.double())).abs().sum(-1).max() < 1e-5


@pytest.mark.parametrize(
    ("spec", "beside"),
    [
        ("sparsemax", False),
        ("entmax", False),
        ("kl:temperature=0.8", False),
        ("kl:temperature=0.8", True),
        ("bok:beta=0,temperature=0.8", False),
        ("bok:solver=exact,beta=3,k=32", False),
        ("bok:solver=exact,beta=1,weights=top-m,m=4", False),
    ],
)
def test_lambda_by_rows(spec, beside):
    """λ = 0 among them: the first of the best tokens."""
    x, other = awkward(SIZES[-1])[[0, 2, 3, 2, 0]], awkward(SIZES[-1]).flip(0)[[4, 0, 3, 4, 6]]
    lam = torch.tensor([[0.0], [1e-6], [2.0], [0.0], [0.3]])
    chosen = decoder(spec)._with({"lam": lam})
    given, context = (Context(other=other), Context(other=other.double())) if beside else (None, None)
    q = chosen.distribution(x.double(), context)
    problem = chosen.problem(x if beside else torch.zeros(5, 1), given)
    plan = plan_for(problem, chosen.method(problem))
    assert plan is not None
    plan = plan.expand(torch.Size([5]))
    plan = plan if plan.other is None else replace(plan, other=plan.other.to(DEVICE))
    written, drawn = gpu.fused_distribution(x.to(DEVICE), plan)
    assert not drawn.status.any()
    assert 0.5 * (written.cpu().double() - q).abs().sum(-1).max() < 1e-5
    seeds = torch.arange(5)
    found = gpu.fused_draw(x.to(DEVICE), plan, seeds.to(DEVICE), places=True)
    rest = found.places
    assert rest is not None
    tokens, mass = found.tokens.cpu().unsqueeze(-1), found.log_q.cpu().double().exp()
    before = q.cumsum(-1).gather(-1, tokens).squeeze(-1) - mass
    torch.testing.assert_close(mass, q.gather(-1, tokens).squeeze(-1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(before + rest.cpu() * mass, uniform(seeds), atol=3e-6, rtol=0)


@pytest.mark.parametrize(
    "spec", ["tree-bok:beta=5,alone=0.7", "tree-bok:beta=4,together=1.4,weights=top-m", "tree-bok:beta=0,together=1.5"]
)
def test_siblings_by_rows(spec):
    x, chosen = awkward(SIZES[-1])[:4], decoder(spec)
    context = Context(siblings=torch.tensor([1, 2, 8, 64]))
    q = chosen.distribution(x.double(), context)
    plan = plan_for(chosen.problem(torch.zeros(4, 1), context), None)
    assert plan is not None
    written, drawn = gpu.fused_distribution(x.to(DEVICE), plan.expand(torch.Size([4])))
    assert not drawn.status.any()
    assert 0.5 * (written.cpu().double() - q).abs().sum(-1).max() < 1e-5


def test_two_models():
    x, other = awkward(SIZES[-1])[:4], awkward(SIZES[-1]).flip(0)[3:]
    context = Context(other=other.double())
    chosen = decoder("kl:lam=0.7,temperature=1.3")
    q = chosen.distribution(x.double(), context)
    plan = plan_for(chosen.problem(x, Context(other=other)), None)
    assert plan is not None
    assert plan.other is not None
    on_device = replace(plan, other=plan.other.to(DEVICE))
    written, drawn = gpu.fused_distribution(x.to(DEVICE), on_device)
    assert not drawn.status.any()
    assert 0.5 * (written.cpu().double() - q).abs().sum(-1).max() < 1e-5
    seeds = torch.arange(4)
    found = gpu.fused_draw(x.to(DEVICE), on_device, seeds.to(DEVICE)).tokens.cpu()
    assert torch.equal(found, chosen.sample(x, seeds=seeds, context=Context(other=other)))


def test_a_row_depends_on_itself_alone():
    x, seeds = awkward(SIZES[-1]).to(DEVICE), torch.arange(7, device=DEVICE)
    crowd = 60 if GPU else 1  # more rows than multiprocessors
    x, seeds = x.repeat(crowd, 1), seeds.repeat(crowd)
    for spec in SPECS if GPU else SPECS[:3]:
        plan = plan_of(spec)
        together = gpu.fused_draw(x, plan, seeds, 5)
        for i in (0, 2, 6, len(x) - 4):
            alone = gpu.fused_draw(x[i : i + 1], plan, seeds[i : i + 1], 5)
            assert alone.tokens[0] == together.tokens[i]
            assert alone.log_q[0] == together.log_q[i]
    assert gpu.fused_draw(x[:0], plan_of("softmax"), seeds[:0]).tokens.shape == (0,)


def test_parameters_seeds_and_steps_in_any_layout():
    x, plan = awkward(SIZES[-1])[[0, 2, 3, 5]].to(DEVICE), plan_of("top-p:p=0.7")
    shared, apart = torch.tensor(5, device=DEVICE), torch.arange(8, device=DEVICE)
    tau = torch.tensor([0.7, 9.0, 0.8, 9.0, 0.9, 9.0, 1.0, 9.0], device=DEVICE)[::2]
    strided, plain = (replace(plan, lam=t, tau=t) for t in (tau, tau.contiguous()))
    for seeds, step in [(shared.expand(4), 3), (apart[::2], 3), (apart[:4], shared.expand(4)), (apart[:4], apart[::2])]:
        numbers = uniform(seeds.cpu(), step.cpu() if isinstance(step, torch.Tensor) else step).to(DEVICE)
        expected = gpu.fused_draw(x, plain, uniforms=numbers).tokens
        assert torch.equal(gpu.fused_draw(x, strided, seeds, step).tokens, expected)
    spread = torch.stack([numbers, numbers], -1)[:, 0]
    assert torch.equal(gpu.fused_draw(x, plain, uniforms=spread).tokens, expected)


def test_tables_begin_where_triton_expects_it():
    tables = gpu._tables(torch.device(DEVICE), 38, 7, 0, 5)
    assert [table.data_ptr() % 16 for table in tables if len(table)] == [0, 0, 0]
    for value, table in enumerate(tables):
        table.fill_(value)
    assert [table.tolist() for table in tables] == [[0.0] * 38, [1.0] * 7, [], [3.0] * 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_effective_temperatures_from_one_read(dtype):
    size = SIZES[-1] if GPU else 5000
    x = torch.randn(12, size, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.5, 9, 12).unsqueeze(-1)
    x = x.to(dtype)
    x[3, : size // 2] = -torch.inf
    x[4, :7] = 40.0  # tied
    x[5] = 1.0
    tau = torch.linspace(0.2, 2.0, 12, dtype=torch.float64)
    target = entropy(torch.softmax(x.double() / tau.unsqueeze(-1), -1))
    target[6] = 0.0
    expected = effective_temperature(x, target)
    assert expected[5].isnan()
    assert expected[6] == 0
    on = x.to(DEVICE)
    found = effective_temperature(on, target.to(DEVICE), MomentsOnGPU(on)).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("spec", ["softmax", "top-p:p=0.7", "sparsemax", "bok"])
def test_codes_move_on_as_they_do_on_a_cpu(spec):
    x, chosen = awkward(SIZES[-1])[[0, 1, 2, 3]], decoder(spec)
    codes, same = Codes.spread(7, 4, DEVICE), Codes.spread(7, 4)
    for step in range(3):
        rows = x.roll(step, 0)
        drawn = chosen._draw_on_gpu(rows.to(DEVICE), plan_of(spec), None, None, 0, codes)
        assert drawn.places is not None
        gpu_codes.move_on(codes, drawn.places, drawn.log_q)
        expected, log_q = chosen.sample(rows, codes=same, log_q=True)
        assert torch.equal(drawn.tokens.cpu(), expected)
        torch.testing.assert_close(drawn.log_q.cpu(), log_q, atol=1e-5, rtol=1e-5)
        # what is left of a code is stretched, and with it the rounding of the sums
        assert bool(((codes.code.cpu() - same.code).abs() <= 3e-7 / log_q.double().exp()).all())
        codes.code = same.code.to(DEVICE)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_codes_on_a_gpu_are_those_of_a_cpu(size):
    """Or coupled texts would depend on the device."""
    g = torch.Generator().manual_seed(size)
    groups = 40  # of eight: more rows than one program has
    codes, same = Codes.spread(range(groups), size, DEVICE), Codes.spread(range(groups), size)
    siblings, theirs = Siblings(groups * size, size, DEVICE), Siblings(groups * size, size)
    for step in (0, 1, torch.arange(groups * size), torch.tensor(5)):
        tokens = torch.randint(0, 2, (groups * size,), generator=g)
        siblings.follow(tokens.to(DEVICE))
        theirs.follow(tokens)
        codes.step, same.step = step.to(DEVICE) if isinstance(step, torch.Tensor) else step, step
        counts = gpu_codes.respread(codes, siblings)
        same.respread(theirs)
        assert torch.equal(counts.cpu(), theirs.count)
        assert torch.equal(codes.code.cpu(), same.code)
        rest, log_q = torch.rand(groups * size, generator=g, dtype=torch.float64), torch.zeros(groups * size)
        log_q[1::3], log_q[2::3] = -torch.inf, -33.0  # no bit is left, and hardly any
        gpu_codes.move_on(codes, rest.to(DEVICE), log_q.to(DEVICE))
        same.move_on(rest, log_q.double().exp())
        torch.testing.assert_close(codes.code.cpu(), same.code, atol=1e-14, rtol=0)
        codes.code = same.code.to(DEVICE)
        assert torch.equal(torch.as_tensor(codes.step).cpu(), torch.as_tensor(same.step))


def test_rows_and_those_swept_are_counted():
    before, every = swept_rows(DEVICE)
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[1:3, 7] = 40.0
    sizes = {"TILE": 128, "GROUP": 8, "GROUPS": 8}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(gpu, name, value)
        drawn = gpu.fused_draw(x, plan_of("top-p:p=0.9"))
    assert drawn.swept.tolist() == [1, 0, 0, 1, 1]
    assert swept_rows(DEVICE) == (before + 3, every + 5)


def test_what_the_kernels_do_not_know():
    for spec in ("bok:weights=rank", "entmax:alpha=1.2", "greedy", "sparsemax:lam=0"):
        chosen = decoder(spec)
        problem = chosen.problem(torch.zeros(1, 1))
        assert plan_for(problem, chosen.method(problem)) is None


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu():
    """Which takes none; the interpreter lets pass what the compiler does not."""
    script = Path(__file__).with_name("compiled_kernels.py")
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = {line[40:50].strip() for line in done.stdout.splitlines()}
    assert kernels == {"tiles", "solve", "write", "moments", "attend", "_moved", "_respread"}


@pytest.mark.skipif(not GPU, reason="needs a GPU")
class TestOnTheGPU:
    @pytest.mark.parametrize("spec", [*SPECS, "bok", "greedy"])
    def test_decoders_draw_the_same_token_as_on_a_cpu(self, spec):
        x = awkward(32_003)[:, :32_000].contiguous()
        seeds = torch.arange(7)
        on_cpu = decoder(spec).sample(x, seeds=seeds, step=4)
        on_gpu = decoder(spec).sample(x.cuda(), seeds=seeds.cuda(), step=4)
        assert torch.equal(on_gpu.cpu(), on_cpu)
        tokens, status = decoder(spec).sample(x.view(7, 1, -1).cuda(), seeds=seeds.view(7, 1).cuda(), validate=False)
        assert tokens.shape == status.shape == (7, 1)
        mask = torch.zeros(7, 32_000, dtype=torch.bool, device="cuda")
        mask[:, 0] = True
        assert decoder(spec).sample(x.cuda(), context=Context(mask=mask)).tolist() == [0] * 7

    def test_two_models_through_the_decoder(self):
        x, other = awkward(32_003)[:4].cuda(), awkward(32_003).flip(0)[3:].cuda()
        chosen, seeds = decoder("kl:lam=0.7,temperature=1.3"), torch.arange(4)
        on_gpu = chosen.sample(x, seeds=seeds.cuda(), context=Context(other=other))
        assert torch.equal(on_gpu.cpu(), chosen.sample(x.cpu(), seeds=seeds, context=Context(other=other.cpu())))
        with pytest.raises(ValueError, match=r"context\.other"):
            chosen.sample(x, context=Context(other=other[:, :-1]))

    def test_bad_rows_raise(self):
        x = awkward(1000).cuda()
        x[2, 3] = torch.nan
        with pytest.raises(ValueError, match="row 2"):
            decoder("top-p").sample(x)

    @pytest.mark.parametrize(
        "spec", [*SPECS[:3], "min-p", "sparsemax", "entmax", "kl", "bok", *SPECS[11:12], *SPECS[15:17]]
    )
    def test_a_million_draws(self, spec):
        x = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0))
        q, plan = decoder(spec).distribution(x.double())[0], plan_of(spec)
        wide, counts = x.cuda().expand(10_000, -1).contiguous(), torch.zeros(5000, dtype=torch.float64)
        for part in range(100):
            seeds = torch.arange(10_000, device="cuda") + 10_000 * part
            counts += torch.bincount(gpu.fused_draw(wide, plan, seeds).tokens, minlength=5000).cpu()
        expected = q * 1_000_000
        common = expected >= 5
        chi = ((counts - expected).square() / expected)[common].sum()
        freedom = int(common.sum())
        assert chi < freedom + 5 * (2 * freedom) ** 0.5
        assert counts[q == 0].sum() == 0

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode")
    def test_a_graph_can_be_captured(self):
        x, seeds = awkward(32_003).cuda(), torch.arange(7, device="cuda")
        for spec in SPECS:
            chosen = decoder(spec)
            torch.cuda.set_sync_debug_mode("error")
            try:
                expected, _ = chosen.sample(x, seeds=seeds, validate=False)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                tokens, _ = chosen.sample(x, seeds=seeds, validate=False)
            tokens.zero_()
            graph.replay()
            assert torch.equal(tokens, expected)

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode")
    @pytest.mark.parametrize("spec", ["softmax", "bok", "bok:solver=exact", "tree-bok:beta=4", "capped:cap=0.5"])
    def test_coupled_draws_do_not_wait(self, spec):
        x, chosen = awkward(32_003)[:4], decoder(spec)
        siblings = Siblings(4, 4, "cuda")
        codes, same = Codes.spread(7, 4, "cuda"), Codes.spread(7, 4)
        on_device, context = x.cuda(), Context(siblings=siblings.count)
        chosen.sample(on_device, context=context, codes=Codes.spread(7, 4, "cuda"), validate=False)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            codes.respread(siblings)
            tokens, status = chosen.sample(on_device, context=context, codes=codes, validate=False)
            siblings.follow(tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not status.any()
        same.respread(Siblings(4, 4))
        expected = chosen.sample(x, context=Context(siblings=torch.full((4,), 4)), codes=same)
        assert torch.equal(tokens.cpu(), expected)

    def test_extra_memory(self):
        for batch, limit in ((1, 256 << 10), (32, 0.02 * 4 * 32 * 151_936)):
            x, seeds = torch.randn(batch, 151_936, device="cuda"), torch.arange(batch, device="cuda")
            for spec in SPECS:
                plan = plan_of(spec)
                gpu.fused_draw(x, plan, seeds)
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                gpu.fused_draw(x, plan, seeds)
                assert torch.cuda.max_memory_allocated() - before < limit
