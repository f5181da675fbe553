"""Runs on the embedded model: durable records, resuming, controls, reports, a cluster."""

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from simplexity import embedded
from simplexity.draw import derive_seeds
from simplexity.engines.transformers import generate
from simplexity.evaluation.commands import said
from simplexity.evaluation.plan import RunPlan, at_temperatures, batches, seed_of
from simplexity.evaluation.records import Ledger, read_run
from simplexity.evaluation.report import write_report
from simplexity.evaluation.run import Breakdown, Grading, Progress, evaluate
from simplexity.evaluation.task import Grade, Question
from simplexity.evaluation.tasks import task
from simplexity.evaluation.writer import TransformersWriter
from simplexity.evaluation.written import Text, Written
from stopped_runs import go

pytestmark = pytest.mark.xdist_group("model")
QUESTIONS = [
    ("What is 2 + 3?", "5"), ("Tom has 4 apples and buys 3 more. How many has he?", "7"), ("What is 10 - 4?", "6"),
    ("What is 3 * 3?", "9"), ("Half of 16 is?", "8"),
]  # fmt: skip


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "questions.jsonl"
    lines = [json.dumps({"question": q, "answer": f"So it is.\n#### {a}"}) for q, a in QUESTIONS]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def plan(data) -> RunPlan:
    decoders = ("softmax", "bok:beta=0.05")
    return RunPlan(None, "gsm8k", decoders, n=2, seed=3, data=str(data), batch=4, max_new_tokens=6, every=2)


@pytest.fixture(scope="module")
def writer():
    return TransformersWriter(RunPlan(None, "gsm8k", ("softmax",), n=2), "Put the answer in a box.", "cpu")


def without_times(folder) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def alike(found: list[dict], expected: list[dict]) -> bool:
    """Equal in every field; what was measured on the logits up to the order in which another process may sum them."""
    measured = ("entropy", "effective_temperature")
    plain = lambda records: [{k: v for k, v in r.items() if k not in measured} for r in records]  # noqa: E731
    numbers = lambda records: [[r[name] or 0.0 for name in measured] for r in records]  # noqa: E731
    assert plain(found) == plain(expected)
    torch.testing.assert_close(torch.tensor(numbers(found)), torch.tensor(numbers(expected)), rtol=1e-2, atol=1e-4)
    return True


class Counting:
    """Grades as told, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def grade(self, pairs):
        self.asked += [(question.id, text) for question, text in pairs]
        return [Grade(text == "5", text) for _, text in pairs]


def test_a_text_is_made_by_who_grades_it_and_graded_once(plan, tmp_path):
    questions, asked, threads = task("gsm8k").load(Path(plan.data)), Counting(), set()

    def read(said):
        threads.add(threading.get_ident())
        return [Text(i // 2, i % 2, i, text, 1, "stop", 0.5, None) for i, text in enumerate(said)]

    with Ledger(tmp_path / "run", plan, "f", {}) as ledger, Grading(ledger, asked, Breakdown(), Progress()) as grading:
        for arm, said in zip(plan.arms, (["5", "5", "5", "6"], ["5", "7", "6", "6"]), strict=True):
            work = batches(plan, arm, questions)[0]
            grading.add(work, Written(lambda said=said: read(said), 1.0, 0.5, 0.1))
    first, second = (question.id for question in work.questions)
    assert asked.asked == [(first, "5"), (second, "5"), (second, "6"), (first, "7")]
    assert [record.correct for record in ledger.records] == [True, True, True, False, True, False, False, False]
    assert threads
    assert threading.get_ident() not in threads


def graded_late(plan, folder, grade):
    """(batches, records) of a run whose first batch is graded when all the others have come."""
    questions, go_on = task("gsm8k").load(Path(plan.data)), threading.Event()

    class Late:
        def grade(self, pairs):
            assert go_on.wait(60)
            return grade(pairs)

    works = [work for arm in plan.arms for work in batches(plan, arm, questions)]
    with Ledger(folder, plan, "f", {}) as ledger, Grading(ledger, Late(), Breakdown(), Progress()) as grading:
        for number, work in enumerate(works):
            texts = [Text(0, 0, 1, str(number), 1, "stop", 0.5, None)]
            grading.add(work, Written(lambda texts=texts: texts, 1.0, 0.5, 0.1, 3, 40))
            while number == 0 and grading.queue:
                time.sleep(0.001)
        go_on.set()
    return works, ledger.records


def test_what_comes_while_others_are_graded_is_graded_together(plan, tmp_path):
    calls, intervals, before = [], set(), sys.getswitchinterval()

    def grade(pairs):
        calls.append(sorted(text for _, text in pairs))
        intervals.add(sys.getswitchinterval())
        return [Grade(True, text) for _, text in pairs]

    works, found = graded_late(plan, tmp_path, grade)
    assert calls == [["0"], ["1", "2", "3", "4"], ["5"]]
    assert [(r.batch, r.decoder, r.text) for r in found] == [
        (work.number, work.arm.decoder, str(number)) for number, work in enumerate(works)
    ]
    assert max(intervals) < before == sys.getswitchinterval(), "the thread of the model waits for that of the grader"


def test_a_batch_that_cannot_be_graded_takes_no_other_along(plan, tmp_path):
    def grade(pairs):
        if any(text == "3" for _, text in pairs):
            raise RuntimeError("not this one")
        return [Grade(True, text) for _, text in pairs]

    with pytest.raises(RuntimeError, match="not this one"):
        graded_late(plan, tmp_path, grade)
    assert {r.text for r in read_run(tmp_path)[2]} >= {"0", "1", "2", "4"}


def test_written_texts_travel_without_their_tokenizer():
    texts = [Text(0, 0, 1, "five", 1, "stop", 0.5, 0.7)]
    arrived = pickle.loads(pickle.dumps(Written(lambda: texts, 1.0, 0.5, 0.1, 3, 40)))
    assert (arrived.seconds, arrived.forward, arrived.looking, arrived.swept, arrived.rows) == (1.0, 0.5, 0.1, 3, 40)
    assert arrived.texts == texts


def test_what_is_said_of_a_run():
    assert said(Breakdown()) == "nothing was left to do"
    found = said(Breakdown(forward=6.0, looking=1.0, writing=9.0, waiting=1.0))
    assert found == "10 s: forward 60%, draws and bookkeeping 20%, measuring entropy 10%, waiting for grades 10%"
    assert said(Breakdown(writing=9.0, swept=3, rows=1200)).endswith("; 0.25% of 1,200 rows swept")


def test_every_sample_has_a_record_and_a_stopped_run_goes_on(plan, writer, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    times = go(plan, whole, writer)
    assert 0 < times.forward <= times.writing
    assert sum(times.shares().values()) == pytest.approx(1)
    found = without_times(whole)
    named = [r["decoder"] for r in found]
    assert named[:10] == ["softmax"] * 10
    assert named[10:20] == ["bok:beta=0.05"] * 10
    assert all(name.startswith("softmax:temperature=0.") for name in named[20:])  # the control, as sharp as bok was
    assert len(named) == 30
    assert {(r["question"], r["sample"]) for r in found[:10]} == {(r["question"], r["sample"]) for r in found[10:20]}
    assert len({r["seed"] for r in found}) == 10, "the same seeds under every decoder"
    assert all(0 < r["tokens"] <= 6 and r["finish"] in ("stop", "length") and r["entropy"] >= 0 for r in found)

    with pytest.raises(KeyboardInterrupt):
        go(plan, broken, writer, count=2)
    file = broken / "records.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    assert 0 < len(lines) < 30
    file.write_text("".join(lines[:-2]) + lines[-2][: len(lines[-2]) // 2])  # torn in the middle of a line
    go(plan, broken, writer)
    assert without_times(broken) == found
    assert not go(plan, broken, writer).writing, "nothing was left to do"
    assert without_times(broken) == found


def test_what_is_written_when_an_error_ends_the_run_is_graded_and_kept(plan, writer, tmp_path):
    with pytest.raises(RuntimeError):
        go(plan, tmp_path, writer, count=2, end=RuntimeError)
    assert {record.batch for record in read_run(tmp_path)[2]} == {0, 1}


def test_prompts_are_made_into_tokens_once_for_all_arms(writer, monkeypatch):
    calls, model = [], writer.language_model
    encode = model.encode
    monkeypatch.setattr(
        type(model), "encode", lambda self, prompts, *rest: calls.append((prompts, *rest)) or encode(prompts, *rest)
    )
    first = writer._encode(["one", "two"])
    assert writer._encode(["one", "two"]) is first
    assert not torch.equal(writer._encode(["one", "six"])["input_ids"], first["input_ids"])
    monkeypatch.setattr(writer, "system", None)
    assert writer._encode(["one", "two"])["input_ids"].shape != first["input_ids"].shape
    assert len(calls) == 3


def test_coupled_groups_beside_independent_samples(plan, writer, tmp_path):
    plan = replace(plan, n=4, coupled=(1, 2), batch=8, limit=2, max_new_tokens=4)
    go(plan, tmp_path / "both", writer)
    records = read_run(tmp_path / "both")[2]
    arms = [str(arm) for arm in dict.fromkeys(r.arm for r in records)]
    assert arms[:4] == ["softmax", "softmax, coupled 2", "bok:beta=0.05", "bok:beta=0.05, coupled 2"]
    assert [arm.startswith("softmax:temperature=0.") for arm in arms[4:]] == [True, True], "a control for each way"
    assert [arm.endswith(", coupled 2") for arm in arms[4:]] == [False, True]
    assert all(r.group == (None if r.coupled == 1 else r.sample // 2) for r in records)
    pairs = {(r.decoder, r.question, r.group, r.seed) for r in records if r.coupled == 2}
    assert len(pairs) == 3 * 2 * 2, "one seed for each group"
    assert len({seed for *_, seed in pairs}) == 2 * 2, "the same under every decoder"

    # what `generate` gives for the seeds, the batch as it was: other neighbours move the last digits of the logits
    asked, model = {q.id: q for q in task("gsm8k").load(Path(plan.data))}, writer.language_model

    def texts(questions, **options):
        inputs = model.encode([asked[name].prompt for name in questions], system=writer.system)
        found = generate(model.model, **inputs, max_new_tokens=4, **options)
        return [model.text(row[:length]) for row, length in zip(found.tokens, found.lengths, strict=True)]

    alone, drawn = ([r for r in records if r.decoder == "softmax" and r.coupled == size] for size in (1, 2))
    names = [r.question for r in alone[::4]]
    seeds = torch.tensor([seed_of(plan, asked[name]) for name in names])
    assert [r.text for r in alone] == texts(names, n=4, seeds=seeds)
    assert [r.seed for r in alone] == derive_seeds(seeds, 4).tolist()
    groups = drawn[::2]
    expected = texts([r.question for r in groups], n=2, seeds=[r.seed for r in groups], coupled=True)
    assert [r.text for r in drawn] == expected

    # stopped inside a group and resumed
    torn = tmp_path / "torn"
    shutil.copytree(tmp_path / "both", torn)
    lines = (torn / "records.jsonl").read_bytes().splitlines(keepends=True)
    assert json.loads(lines[-3])["coupled"] == 2
    (torn / "records.jsonl").write_bytes(b"".join(lines[:-3]) + lines[-3][:100])
    go(plan, torn, writer)
    assert without_times(torn) == without_times(tmp_path / "both")
    with pytest.raises(ValueError, match=r"other settings.*coupled: \[1, 2\] there, \[1, 4\] now"):
        go(replace(plan, coupled=(4, 1)), torn, writer)


def test_a_seed_is_that_of_its_question(plan):
    one, two = (Question(name, "?", "1") for name in ("a", "b"))
    assert seed_of(plan, one) == seed_of(replace(plan, decoders=("greedy",)), one) == 5876962767596860194
    assert len({seed_of(plan, one), seed_of(plan, two), seed_of(replace(plan, seed=4), one)}) == 3


def test_other_settings_are_refused_with_the_difference(plan, writer, tmp_path, data):
    go(replace(plan, decoders=("greedy",)), tmp_path / "run", writer)
    with pytest.raises(ValueError, match=r"other settings.*n: 2 there, 1 now"):
        go(replace(plan, decoders=("greedy",), n=1), tmp_path / "run", writer)
    data.write_text(data.read_text().replace("apples", "pears"))
    with pytest.raises(ValueError, match="questions themselves"):
        go(replace(plan, decoders=("greedy",)), tmp_path / "run", writer)
    with pytest.raises(ValueError, match="cannot hold the 8 samples"):
        RunPlan(None, "gsm8k", ("softmax",), n=8, batch=4)


def test_a_report(plan, writer, tmp_path):
    decoders = tuple(at_temperatures(["softmax", "bok"], [0.5, 1.0]))
    folder = tmp_path / "run"
    go(replace(plan, decoders=decoders, max_new_tokens=4), folder, writer)
    paths = {path.name: path for path in write_report(folder, tmp_path / "out")}
    assert set(paths) == {"gsm8k.png", "report.md", "report.html"}
    said = paths["report.md"].read_text()
    for title in ("Accuracy by temperature", "Every decoder", "Against a matched temperature"):
        assert f"## {title}" in said
    assert "| `bok` |" in said
    assert "τ = 0.5" in said
    page = paths["report.html"].read_text()
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("http-equiv", "")
    with pytest.raises(ValueError, match="no run"):
        write_report(tmp_path / "out", tmp_path / "out")


def command(data: Path, out: Path) -> list[str]:
    return [
        sys.executable, "-m", "simplexity.cli", "evaluate", "--task", "gsm8k", "--data", str(data), "--out", str(out),
        "--decoder", "softmax", "--decoder", "bok:beta=0.05", "-n", "2", "--batch", "2", "--max-tokens", "6",
        "--seed", "3", "--coupled", "1", "--coupled", "2",
    ]  # fmt: skip


@pytest.mark.slow
def test_killed_at_ten_moments(data, tmp_path):
    subprocess.run(command(data, tmp_path / "whole"), check=True, capture_output=True)
    expected = without_times(tmp_path / "whole")
    out, choose = tmp_path / "killed", random.Random(0)
    for _ in range(10):
        before = (out / "records.jsonl").stat().st_size if (out / "records.jsonl").exists() else 0
        process = subprocess.Popen(command(data, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:  # until it has begun to write, then some
            if (out / "records.jsonl").exists() and (out / "records.jsonl").stat().st_size > before:
                break
            time.sleep(0.01)
        time.sleep(choose.random() * 0.6)
        process.kill()
        process.wait()
    subprocess.run(command(data, out), check=True, capture_output=True)
    assert alike(without_times(out), expected)
    assert read_run(out)[0] == read_run(tmp_path / "whole")[0]


@pytest.mark.slow
def test_the_third_table_of_the_paper_on_the_embedded_model(tmp_path):
    pytest.importorskip("math_verify")
    asked = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n), "unique_id": str(n)} for n in (2, 3)]
    (tmp_path / "math.json").write_text(json.dumps(asked))
    out, simplexity = tmp_path / "table3", [sys.executable, "-m", "simplexity.cli"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # threads that wait for each other crawl on a busy machine
    options = ["--model", embedded.NAME, "--data", f"math500={tmp_path / 'math.json'}", "--task", "math500"]
    subprocess.run(
        [*simplexity, "reproduce", "table3", *options, "--max-tokens", "16", "--out", str(out)], check=True, env=env
    )
    subprocess.run([*simplexity, "report", str(out)], check=True, env=env)
    rows = [line.strip("| ").split(" | ") for line in (out / "report.md").read_text().splitlines()]
    steps, found = (
        next(row[1:] for row in rows if row[0] == name) for name in ("gradient steps", "effective temperature")
    )
    assert steps == ["2", "5", "10", "15", "20"]
    # with a reward too small to matter: 1/τ' = 1/τ + (1 − (1−λ)^J)/λ
    expected = [1 / (1 / 0.7 + (1 - 0.9 ** int(j)) / 0.1) for j in steps]
    assert [float(tau) for tau in found] == pytest.approx(expected, abs=2e-3)


@pytest.mark.slow
def test_a_cluster_that_loses_a_worker(plan, writer, tmp_path):
    ray = pytest.importorskip("ray")
    from simplexity.evaluation.ray_writer import RayWriter

    plan = replace(plan, decoders=("softmax",), batch=2, max_new_tokens=12, coupled=(2,))
    go(plan, tmp_path / "alone", writer)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        spread = RayWriter(plan, "Put the answer in a box.", "local", workers=2)
        made = []

        def actor(make=spread._actor):
            made.append(make())
            return made[-1]

        spread._actor = actor

        class Murderous:
            def write_all(self, works):
                for number, pair in enumerate(spread.write_all(works)):
                    if number == 0:
                        os.kill(ray.get(made[0].process.remote()), signal.SIGKILL)
                    yield pair

        evaluate(plan, task("gsm8k"), tmp_path / "spread", Murderous)
    finally:
        ray.shutdown()
    assert len(made) > 2, "no worker was replaced"
    key = lambda r: (r["question"], r["sample"])  # noqa: E731
    assert alike(*(sorted(without_times(tmp_path / run), key=key) for run in ("spread", "alone")))
