"""Samples in coupled groups: their scores, whole groups in every batch and ledger, and what a report makes of them."""

import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from simplexity.decoders.sparsemax import Sparsemax
from simplexity.evaluation.arms import Arm
from simplexity.evaluation.intervals import paired_difference
from simplexity.evaluation.plan import RunPlan, batches
from simplexity.evaluation.records import Ledger, Record, read_run
from simplexity.evaluation.report import tables, write_report
from simplexity.evaluation.scores import Sampled, distinct_answers, majority_at_k, pass_at_k
from simplexity.evaluation.summary import summarise
from simplexity.evaluation.task import Question

QUESTIONS = [Question(f"q{i}", "?" * (i % 3 + 1), str(i)) for i in range(7)]
PLAN = RunPlan(None, "gsm8k", ("softmax",), n=4, batch=12, coupled=(1, 2))


def vote(answers, correct):
    """The expected correctness of a majority vote, from its definition."""
    votes = Counter(answer for answer in answers if answer is not None)
    leaders = [a for a in votes if votes[a] == max(votes.values())] or [None]
    right = [[c for a, c in zip(answers, correct, strict=True) if a == leader] for leader in leaders]
    return sum(sum(cs) / len(cs) for cs in right) / len(right)


@pytest.mark.parametrize("size", [2, 3, 6])
def test_scores_are_means_over_whole_groups(size):
    g = torch.Generator().manual_seed(size)
    table = torch.randint(4, (5, 6), generator=g).tolist()
    answers = [[None if a == 3 else str(a) for a in row] for row in table]
    correct = torch.tensor([[a == "1" for a in row] for row in answers])
    sampled = Sampled(tuple("abcde"), correct, answers, coupled=size)
    groups = [slice(i, i + size) for i in range(0, 6, size)]
    mean = lambda values: pytest.approx(sum(values) / len(groups))  # noqa: E731
    for q in range(5):
        each = [(answers[q][group], correct[q, group].tolist()) for group in groups]
        assert sampled.pass_at(size).values[q] == mean([any(right) for _, right in each])
        assert sampled.majority_at(size).values[q] == mean([vote(*group) for group in each])
        assert sampled.distinct(size).values[q] == mean([len(set(said) - {None}) for said, _ in each])
    torch.testing.assert_close(sampled.pass_at(1).values, sampled.accuracy().values)
    assert [k for k in range(1, 8) if sampled.has(k)] == [1, size]
    with pytest.raises(ValueError, match=f"k must be 1 or {size}"):
        sampled.pass_at(size + 1)
    with pytest.raises(ValueError, match="not whole groups of 4"):
        Sampled(tuple("abcde"), correct, answers, coupled=4)


def test_evenly_spread_codes_are_nested():
    """A group of four holds two of two, and their score is what pairs drawn for themselves have."""
    table = "aabbcccc"
    said = lambda u, size: [table[int(8 * ((u + i / size) % 1))] for i in range(size)]  # noqa: E731
    starts = [(i + 0.5) / 8 for i in range(8)]
    fours, pairs = [said(u, 4) for u in starts], [said(u, 2) for u in starts]
    right = torch.tensor([[a == "a" for a in row] for row in fours])
    sampled = Sampled(tuple(map(str, range(8))), right, fours, coupled=4, nested=True)
    assert [k for k in range(1, 9) if sampled.has(k)] == [1, 2, 4]
    assert sampled.pass_at(2).mean == sum("a" in pair for pair in pairs) / 8
    assert sampled.distinct(2).mean == sum(len(set(pair)) for pair in pairs) / 8
    assert sampled.pass_at(2).values.tolist() == [sum(any(row[i::2]) for i in (0, 1)) / 2 for row in right.tolist()]
    with pytest.raises(ValueError, match="k must be 1, 2 or 4"):
        sampled.pass_at(3)


def test_subsets_are_biased_where_groups_are_not():
    """Every pair of codes for two groups of 2: answer a below 1/4, b below 1/2, else c; only a is right."""

    def pair(u):
        return ["aabbcccc"[int(8 * ((u + place / 2) % 1))] for place in range(2)]

    pairs = [pair((i + 0.5) / 8) for i in range(8)]
    answers = [[*one, *other] for one, other in itertools.product(pairs, pairs)]
    correct = torch.tensor([[a == "a" for a in row] for row in answers])
    sampled = Sampled(tuple(map(str, range(64))), correct, answers, coupled=2)
    truth = {
        "pass": sum("a" in group for group in pairs) / 8,
        "vote": sum(vote(group, [a == "a" for a in group]) for group in pairs) / 8,
        "distinct": sum(len(set(group)) for group in pairs) / 8,
    }
    assert truth == {"pass": 0.5, "vote": 0.25, "distinct": 2.0}
    ours = [sampled.pass_at(2).mean, sampled.majority_at(2).mean, sampled.distinct(2).mean]
    assert ours == pytest.approx(list(truth.values()), abs=1e-12)
    assert sampled.pass_at(1).mean == pytest.approx(0.25), "each sample alone is an exact draw"
    # 4 of the 6 subsets of two are of different groups, hence independent: 1 − (3/4)² and 2 − 3/8 answers
    assert pass_at_k(correct, 2).mean() == pytest.approx((2 * 0.5 + 4 * 0.4375) / 6)
    assert distinct_answers(answers, 2).mean() == pytest.approx((2 * 2.0 + 4 * 1.625) / 6)
    assert majority_at_k(answers, correct, 2).mean() == pytest.approx(0.25), "of two the vote is a coin's"


def test_a_plan_has_whole_groups_of_every_size():
    plan = replace(PLAN, decoders=("softmax", "greedy"), coupled=(4, 1, 4))
    assert plan.coupled == (1, 4)
    assert [str(arm) for arm in plan.arms] == ["softmax", "softmax, coupled 4", "greedy", "greedy, coupled 4"]
    assert RunPlan(**json.loads(json.dumps(plan.to_json()))) == plan
    with pytest.raises(ValueError, match="n = 4 samples do not make whole groups of 3"):
        replace(PLAN, coupled=(1, 3))
    for sizes in ((), (0,), (-2,)):
        with pytest.raises(ValueError, match="give the sizes of groups"):
            replace(PLAN, coupled=sizes)
    assert [Arm("softmax", 2).group(sample) for sample in range(4)] == [0, 0, 1, 1]
    for arm in PLAN.arms:  # a question stands in one batch, with all its groups
        works = batches(PLAN, arm, QUESTIONS)
        assert Counter(q.id for work in works for q in work.questions) == Counter(q.id for q in QUESTIONS)
        assert all(len(work.questions) * PLAN.n <= PLAN.batch for work in works)


@pytest.mark.parametrize("spec", ["contrastive", "guidance", "controlled"])
def test_a_decoder_that_needs_more_than_scores_is_refused_at_once(spec):
    with pytest.raises(ValueError, match=f"^{spec} needs .*an evaluation does not bring it$"):
        replace(PLAN, decoders=("softmax", spec))


def test_a_plan_names_its_engine():
    assert PLAN.engine == "transformers"
    older = {name: value for name, value in PLAN.to_json().items() if name != "engine"}
    assert PLAN.difference(older) == []
    assert RunPlan(**older).engine == "transformers"
    plan = replace(PLAN, engine="vllm")
    assert plan.difference(older) == ["engine: 'transformers' there, 'vllm' now"]
    assert plan.arms == PLAN.arms
    with pytest.raises(ValueError, match=r"unknown engine 'vlm', did you mean 'vllm'\? There is: transformers, vllm"):
        replace(PLAN, engine="vlm")
    assert replace(PLAN, decoders=("tree-bok",)).decoders == ("tree-bok",)
    with pytest.raises(ValueError, match="tree-bok counts the samples of a group that share a text; vLLM does not"):
        replace(plan, decoders=("softmax", "tree-bok"))


def test_a_decoder_that_looks_at_its_group_has_no_independent_samples(monkeypatch):
    monkeypatch.setattr(Sparsemax, "uses", ("siblings",))
    plan = replace(PLAN, decoders=("softmax", "sparsemax"))
    assert [str(arm) for arm in plan.arms] == ["softmax", "softmax, coupled 2", "sparsemax, coupled 2"]
    with pytest.raises(ValueError, match="sparsemax looks at the samples of its group"):
        replace(plan, coupled=(1,))


def records_of(work, plan, correct):
    """Records of a batch; `correct(arm, question, sample)` says which are right."""
    return [
        Record(
            work.arm.decoder, work.number, q.id, i, 7, "a text", 3, "stop", 0.5, 0.9, correct(work.arm, q, i),
            str(correct(work.arm, q, i)), "", 0.1, work.arm.coupled, work.arm.group(i),
        )
        for q in work.questions
        for i in range(plan.n)
    ]  # fmt: skip


def filled(folder, plan, correct=lambda arm, question, sample: False):
    about = {"versions": {}, "machine": "a machine", "date": "a day"}
    with Ledger(folder, plan, "the questions", about) as ledger:
        for arm in plan.arms:
            for work in batches(plan, arm, QUESTIONS):
                ledger.append(work, records_of(work, plan, correct))
    return folder


def test_a_torn_group_is_dropped_with_its_batch(tmp_path):
    whole = (filled(tmp_path / "whole", PLAN) / "records.jsonl").read_bytes()
    rows = [12, 12, 4] * 2  # three batches of the independent arm, three of the coupled one
    plan = (tmp_path / "whole" / "plan.json").read_text()
    ends = list(itertools.accumulate(len(line) for line in whole.splitlines(keepends=True)))
    folder = tmp_path / "torn"
    folder.mkdir()
    (folder / "plan.json").write_text(plan)
    for end in {*ends[20:], *(end - 9 for end in ends[20:])}:  # after a line, and inside one
        (folder / "records.jsonl").write_bytes(whole[:end])
        with Ledger(folder, PLAN, "the questions", {}) as ledger:
            counts = Counter((r.arm, r.batch) for r in ledger.records)
            kept = sum(line <= end for line in ends)
            fit = sum(total <= kept for total in itertools.accumulate(rows))
            assert list(counts.values()) == rows[:fit]
            assert ledger.done() == set(counts)
            groups = Counter((r.question, r.group) for r in ledger.records if r.coupled == 2)
            assert set(groups.values()) <= {2}


def test_runs_from_before_groups_still_read_and_go_on(tmp_path):
    plan = replace(PLAN, coupled=(1,))
    folder = filled(tmp_path / "old", plan)
    said = json.loads((folder / "plan.json").read_text())
    del said["plan"]["coupled"]
    (folder / "plan.json").write_text(json.dumps(said))
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    old = [{k: v for k, v in line.items() if k not in ("coupled", "group")} for line in lines]
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    found, _, records = read_run(folder)
    assert found == plan
    assert {(r.arm, r.group) for r in records} == {(Arm("softmax"), None)}
    with Ledger(folder, plan, "the questions", {}) as ledger:
        assert len(ledger.done()) == 3
    with (
        pytest.raises(ValueError, match=r"coupled: \[1\] there, \[1, 2\] now"),
        Ledger(folder, PLAN, "the questions", {}),
    ):
        pass
    assert summarise(folder).ks == [1, 2, 4]


def right(arm, question, sample):
    """Cold: the first five questions, half of the samples. Hot: all, one sample in four; spread where coupled."""
    number = int(question.id[1:])
    if "0.5" in arm.decoder:
        return number < 5 and sample % 4 < 2
    return sample % 4 == 0 if arm.coupled > 1 else sample < 2  # of 8 samples, 2 are right both ways


def test_a_report_of_both_ways(tmp_path):
    plan = replace(PLAN, decoders=("softmax:temperature=0.5", "softmax:temperature=1.0"), n=8, batch=16, coupled=(1, 4))
    summary = summarise(filled(tmp_path / "run", plan, right))
    assert summary.ks == [1, 2, 4, 8]
    assert summary.sizes == [4]
    found = {title: rows for title, _, rows in tables(summary)}
    head, *body = found["Every decoder"]
    at = {name: head.index(name) for name in ("pass@2", "pass@4", "pass@8", "maj@4", "distinct@4")}
    hot = {row[0]: row for row in body if row[0].startswith("`softmax`")}
    assert set(hot) == {"`softmax`", "`softmax`, coupled 4"}
    independent, coupled = hot["`softmax`"], hot["`softmax`, coupled 4"]
    assert [coupled[i] for i in at.values()] == ["50.0", "100.0", "–", "0.0", "2.00"]
    assert independent[at["pass@4"]] == f"{100 * (1 - 15 / 70):.1f}"
    assert "–" not in independent

    twins = found["Coupled against independent samples"]
    assert [row[:2] for row in twins[1:]] == [
        [name, k] for name in ("`softmax:temperature=0.5`", "`softmax`") for k in ("2", "4")
    ]
    assert twins[4][2] == f"{100 * 15 / 70:+.1f} [{100 * 15 / 70:+.1f}, {100 * 15 / 70:+.1f}], beyond chance"
    lines = {line.arm: line.sampled for line in summary.lines}
    expected = paired_difference(
        lines[Arm("softmax:temperature=0.5", 4)].pass_at(4), lines[Arm("softmax:temperature=0.5")].pass_at(4)
    )
    assert summary.against_independent(summary.lines[1], 4)[0] == expected
    assert summary.against_independent(summary.lines[1], 8) is None
    assert summary.against_independent(summary.lines[0], 4) is None

    above = summary.area(Arm("softmax", 4), 4)
    # at pass@1 = 1/4 it is the hot settings' difference, at 5/14 the cold ones', linear between them
    assert above.estimate == pytest.approx((15 / 70 + expected.estimate) / 2)
    assert summary.area(Arm("softmax", 4), 8) is None
    name, at_2, _, at_8 = found["Frontiers"][1]
    assert (name, at_8) == ("`softmax`, coupled 4", "–")
    assert at_2.startswith("+")

    said = next(path for path in write_report(tmp_path / "run", tmp_path / "out") if path.name == "report.md")
    assert "every second, every fourth … of a group, which are groups of their own" in said.read_text()
    assert "independent or coupled in groups of 4" in said.read_text()
    assert "![pass@1 against pass@4]" in said.read_text()


def test_a_report_of_coupled_samples_alone(tmp_path):
    decoders = tuple(f"{name}:temperature={t}" for name in ("softmax", "top-k") for t in (0.5, 1.0))
    plan = replace(PLAN, decoders=decoders, n=8, batch=16, coupled=(2, 4))
    summary = summarise(filled(tmp_path / "run", plan, right))
    assert summary.ks == [1, 2, 4]
    found = {title: (note, rows) for title, note, rows in tables(summary)}
    assert "Coupled against independent samples" not in found
    note, rows = found["Frontiers"]
    assert "softmax coupled alike" in note
    cells = {row[0]: row[1:] for row in rows[1:]}
    assert [cells[f"`top-k`, coupled {k}"] for k in (2, 4)] == [
        ["+0.0 [+0.0, +0.0]", "–"],
        ["+0.0 [+0.0, +0.0]", "+0.0 [+0.0, +0.0]"],
    ]
    write_report(tmp_path / "run", tmp_path / "out")
