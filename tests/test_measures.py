"""Entropy, effective temperature, `describe`, and decoders given a target in place of a temperature."""

import json
import math

import pytest
import torch

from simplexity import Context, decoder, effective_temperature, entropy


@pytest.mark.parametrize("temperature", [0.05, 0.3, 1.0, 4.0, 50.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_effective_temperature_of_a_softmax_is_its_temperature(scale, temperature):
    s = torch.randn(5, 200).double() * scale
    target = entropy(torch.softmax(s / (temperature * scale), -1))
    found = effective_temperature(s, target)
    torch.testing.assert_close(found, torch.full_like(found, temperature * scale), rtol=1e-6, atol=0)


def test_few_passes_find_the_effective_temperature_of_sharp_rows(monkeypatch):
    s = torch.randn(400, 500).double().mul_(torch.linspace(1, 30, 400).unsqueeze(-1))
    target = entropy(torch.softmax(s / 0.5, -1))
    assert (target < 1e-6).any(), "some are as sharp as the certain tokens of a text"
    monkeypatch.setattr("simplexity.measures.NEWTON_STEPS", 12)
    found = effective_temperature(s, target)[target > 1e-9]
    torch.testing.assert_close(found, torch.full_like(found, 0.5), rtol=1e-7, atol=0)


def test_one_row_for_several_targets_and_one_target_for_several_rows():
    s, targets = torch.randn(50).double(), torch.tensor([1.0, 2.0, 0.5]).double()
    each = torch.stack([effective_temperature(s, target) for target in targets])
    torch.testing.assert_close(effective_temperature(s, targets), each)
    torch.testing.assert_close(effective_temperature(s.unsqueeze(0), targets), each)
    torch.testing.assert_close(effective_temperature(s.expand(4, -1), targets[0]), each[:1].expand(4))


def test_effective_temperature_where_it_has_no_or_no_finite_value():
    s = torch.tensor([[3.0, 2.0, 0.0], [1.0, 1.0, 1.0], [3.0, 3.0, 0.0], [3.0, 3.0, 0.0]]).double()
    one_hot, uniform = torch.tensor(0.0).double(), torch.tensor(math.log(3)).double()
    assert effective_temperature(s, one_hot.expand(4)).tolist()[0] == 0
    assert effective_temperature(s, one_hot.expand(4))[1:].isnan().all()
    assert effective_temperature(s, uniform.expand(4))[[0, 2, 3]].isinf().all()
    assert effective_temperature(s, uniform.expand(4))[1].isnan()
    assert effective_temperature(torch.zeros(1, 1).double(), torch.zeros(1).double()).isnan().all()
    assert decoder("greedy").describe(s[0]).effective_temperature == 0
    assert decoder("greedy").describe(s[2]).effective_temperature.isnan()
    assert decoder("sparsemax:lam=1e6").describe(s[0].float()).effective_temperature > 1e4


def test_the_paper_setting_is_a_low_temperature_in_disguise():
    report = decoder("bok:beta=0,lam=0.1,step=1,steps=5,temperature=0.9").describe(4 * torch.randn(6, 5_000))
    assert [round(t, 3) for t in report.effective_temperature.tolist()] == [0.192] * 6


def test_describe_of_a_softmax():
    s = torch.randn(4, 300)
    report = decoder("softmax:temperature=0.5").describe(s)
    q, p = torch.softmax(s.double() / 0.5, -1), torch.softmax(s.double(), -1)
    torch.testing.assert_close(report.entropy, -(q * q.log()).sum(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(report.kl, (q * (q / p).log()).sum(-1), atol=1e-5, rtol=0)
    assert (report.support_size == 300).all()
    assert (report.effective_temperature - 0.5).abs().max() < 1e-4
    assert (report.gap < 1e-5).all()
    assert (decoder("softmax").describe(s).kl.abs() < 1e-6).all()


def test_describe_with_a_mask_speaks_of_the_masked_model():
    s, mask = torch.randn(2, 50), torch.rand(2, 50) < 0.5
    report = decoder("softmax").describe(s, Context(mask=mask))
    assert (report.support_size == mask.sum(-1)).all()
    assert (report.kl.abs() < 1e-6).all()
    assert (report.effective_temperature - 1).abs().max() < 1e-4


@pytest.mark.parametrize(
    "spec",
    [
        "softmax",
        "top-k:k=40",
        "kl:lam=5",
        "bok:scores=none",
        pytest.param("bok:scores=none,solver=exact", marks=pytest.mark.slow),  # without host reads: its worst case
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_target_entropy_is_met(spec, dtype):
    s = 3 * torch.randn(5, 400, dtype=dtype)
    joint = "," if ":" in spec else ":"
    targeted = decoder(f"{spec}{joint}entropy=1.5")
    assert (targeted.describe(s).entropy - 1.5).abs().max() < (1e-9 if dtype == torch.float64 else 1e-4)
    q, status = targeted.distribution(s, validate=False)
    assert (status == 0).all()
    torch.testing.assert_close(q, targeted.distribution(s), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("spec", ["softmax", "kl:lam=5", "bok:scores=none,beta=1"])
def test_a_target_temperature_is_met(spec):
    s = 3 * torch.randn(5, 400)
    joint = "," if ":" in spec else ":"
    report = decoder(f"{spec}{joint}effective_temperature=0.5").describe(s)
    assert (report.effective_temperature - 0.5).abs().max() < 1e-3


def test_a_single_allowed_token_meets_any_target():
    s = torch.full((2, 9), -float("inf"))
    s[0, 3], s[1] = 1.0, torch.randn(9)
    assert decoder("softmax:entropy=0.5").distribution(s)[0, 3] == 1


def test_targets_survive_json():
    d = decoder("softmax:entropy=0.6")
    assert decoder(json.loads(json.dumps(d.to_json()))) == d
    with pytest.raises(ValueError, match="beside another model"):
        decoder("kl:entropy=1").distribution(torch.randn(1, 4), Context(other=torch.randn(1, 4)))


def test_a_target_per_row():
    s = 3 * torch.randn(3, 400)
    wanted = torch.tensor([0.5, 1.0, 2.0])
    found = decoder({"decoder": "softmax", "entropy": wanted.tolist()}).describe(s).entropy
    torch.testing.assert_close(found.float(), wanted, atol=1e-4, rtol=0)


def test_where_the_entropy_jumps_the_target_is_bracketed():
    s = torch.tensor([[4.0, 2.0, 1.0, 0.5, 0.0]]).double()
    d = decoder("top-p:p=0.9,entropy=0.9")
    found = d.describe(s).entropy.item()
    grid = torch.linspace(0.05, 5, 4000).tolist()
    reachable = [decoder(f"top-p:p=0.9,temperature={t}").describe(s).entropy.item() for t in grid[::20]]
    below, above = max(h for h in reachable if h <= 0.9), min(h for h in reachable if h >= 0.9)
    assert below - 1e-6 <= found <= above + 0.05


def test_targets_out_of_reach_are_refused_by_row():
    s = torch.stack([torch.randn(50), torch.full((50,), -float("inf"))])
    s[1, :2] = torch.tensor([1.0, 0.0])
    with pytest.raises(ValueError, match="row 1: the target cannot be reached"):
        decoder("softmax:entropy=1.5").distribution(s)
    q, status = decoder("softmax:entropy=1.5").distribution(s, validate=False)
    assert status.tolist() == [0, 4]
    assert (q[1] == 0).all()
    with pytest.raises(ValueError, match="target cannot be reached"):
        decoder("bok:entropy=3").distribution(3 * torch.randn(1, 400))  # raw logits keep it cold at any temperature


def test_a_tie_tells_no_temperature_that_rounding_could_have_made():
    scores = torch.tensor([[5.0, 5.0, 0.0, -1.0]])
    cold, warm = (decoder(f"softmax:temperature={tau}").distribution(scores) for tau in (0.05, 1.0))
    noise = entropy(cold) + 2e-7  # what float32 makes of ln 2
    assert effective_temperature(scores, noise).isnan().all()
    torch.testing.assert_close(effective_temperature(scores, entropy(warm)).item(), 1.0, atol=1e-4, rtol=0)
