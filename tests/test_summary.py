"""A run in numbers: how sharp a decoder is, and the softmax it is held against."""

import gzip
import json
from dataclasses import asdict

import pytest
import torch

from simplexity import decoder
from simplexity.engines.trace import Trace
from simplexity.evaluation.arms import Arm
from simplexity.evaluation.plan import RunPlan
from simplexity.evaluation.records import Ledger, Record
from simplexity.evaluation.report import tables
from simplexity.evaluation.summary import summarise
from simplexity.measures import effective_temperature, entropy, tells_temperature


def test_certain_tokens_say_nothing_about_a_temperature():
    # gaps of 1 to 40 between the best token and the rest: at τ = 0.2 the wide ones are one-hot to all digits kept
    scores = torch.zeros(40, 50)
    scores[:, 7] = torch.arange(1.0, 41.0)
    q = decoder("softmax:temperature=0.2").distribution(scores)
    sharpness, found = entropy(q), effective_temperature(scores, entropy(q))
    telling = tells_temperature(found, sharpness)
    assert found.mean() < 0.05, "so many are 0 that the mean is worthless"
    assert telling.sum() >= 4
    torch.testing.assert_close(found[telling].mean().item(), 0.2, rtol=1e-3, atol=0)


def test_a_trace_measures_what_log_q_says():
    scores, trace = torch.tensor([[3.0, 2.0, 0.0]]), Trace()
    chosen = decoder("softmax:temperature=0.5")
    trace.add(chosen, scores, None, torch.tensor([1]))
    q = chosen.distribution(scores)
    torch.testing.assert_close(trace.log_q[0], q[:, 1].log())
    torch.testing.assert_close(trace.entropy[0], entropy(q), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(trace.effective_temperature[0], torch.tensor([0.5]).double(), atol=1e-5, rtol=0)


def a_run(folder, lines: dict[str, tuple[float, list[int]]], coupled: int = 1) -> None:
    """One of two questions, n = 2; by decoder: the entropy and who of the four samples is right."""
    plan = RunPlan(None, "gsm8k", tuple(lines), n=2, batch=4, controls=False, coupled=(coupled,))
    content = {"plan": plan.to_json(), "questions": "x", "about": {"date": "", "machine": "", "versions": {}}}
    (folder / "plan.json").write_text(json.dumps(content))
    records = [
        asdict(
            Record(name, 0, f"q{i // 2}", i % 2, i, "", 10, "stop", sharp, None, bool(ok), str(ok), "", 0.1, coupled)
        )
        for name, (sharp, right) in zip(plan.decoders, lines.values(), strict=True)
        for i, ok in enumerate(right)
    ]
    (folder / "records.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in records).encode()))


def test_the_control_has_the_same_mean_entropy(tmp_path):
    a_run(
        tmp_path,
        {
            "softmax:temperature=0.25": (0.01, [1, 1, 0, 0]),
            "softmax": (0.16, [1, 0, 0, 0]),
            "bok": (0.04, [1, 1, 1, 0]),  # halfway between the two, in logarithms
            "top-p:p=0.8": (0.3, [0, 0, 0, 0]),
        },
    )
    found = summarise(tmp_path)
    by_name = {line.arm: line for line in found.lines}
    bok, wide = by_name[Arm("bok")], by_name[Arm("top-p:p=0.8")]
    assert found.as_sharp(bok) == pytest.approx(0.5)
    assert found.as_sharp(wide) is None, "outside the sweep"
    assert found.as_sharp(by_name[Arm("softmax")]) is None, "a softmax needs no control"
    told = found.control(bok)
    assert told is not None
    assert told[0] == "softmax at 0.5, between its neighbours"
    assert told[1].values.tolist() == pytest.approx([0.75, 0.0])
    cells = [cell for _, _, rows in tables(found) for row in rows for cell in row]
    assert "≈ 0.500" in cells
    assert found.control(wide) is None


def test_a_family_is_a_decoder_with_its_own_knob_turned(tmp_path):
    def families(names: list[str], coupled: int) -> dict[str, list[float]]:
        a_run(tmp_path, dict.fromkeys(names, (0.1, [1, 0, 0, 0])), coupled)
        found = summarise(tmp_path).families
        return {family.decoder: sorted(line.knob or 0 for line in lines) for family, lines in found.items()}

    names = ["softmax:temperature=0.5", "softmax", "bok:steps=2,temperature=0.5", "bok:steps=2", "bok", "greedy"]
    names += ["sparsemax:lam=0.5", "sparsemax:lam=2", "entmax:alpha=1.2,lam=0.5", "entmax:alpha=1.4,lam=0.5"]
    found = families(names, 1)
    assert found == {
        "softmax": [0.5, 1.0],
        "bok:steps=2": [0.5, 1.0],
        "bok": [1.0],
        "sparsemax": [0.5, 2.0],
        "entmax:alpha=1.2": [0.5],
        "entmax:alpha=1.4": [0.5],
        "greedy": [0],
    }
    names = ["tree-bok:alone=0.3,together=0.8", "tree-bok:alone=0.5,together=0.8", "tree-bok:alone=0.5"]
    assert families(names, 2) == {"tree-bok:together=0.8": [0.3, 0.5], "tree-bok": [0.5]}


def test_packed_records_are_not_run_over(tmp_path):
    a_run(tmp_path, {"softmax": (0.1, [1, 0, 0, 0])})
    plan = RunPlan(None, "gsm8k", ("softmax",), n=2, batch=4, controls=False)
    with pytest.raises(ValueError, match="unpack them to go on there"), Ledger(tmp_path, plan, "x", {}):
        pass
    assert not (tmp_path / "records.jsonl").exists()
