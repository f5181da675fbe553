"""Evaluations with vLLM as the engine, in this process and inside Ray's workers, beside transformers."""

import json
import os
import re
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from needed import needed

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
needed("vllm", "vllm")
ray = needed("vllm", "ray")

from vllm import SamplingParams  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402

from simplexity.cli import app  # noqa: E402
from simplexity.evaluation.arms import Arm  # noqa: E402
from simplexity.evaluation.plan import RunPlan, Work, batches  # noqa: E402
from simplexity.evaluation.ray_writer import RayWriter  # noqa: E402
from simplexity.evaluation.records import read_run  # noqa: E402
from simplexity.evaluation.run import evaluate  # noqa: E402
from simplexity.evaluation.task import Question  # noqa: E402
from simplexity.evaluation.tasks import task  # noqa: E402
from simplexity.evaluation.vllm_writer import VLLMWriter  # noqa: E402
from simplexity.evaluation.writer import TransformersWriter  # noqa: E402
from stopped_runs import go  # noqa: E402

QUESTIONS = [
    ("What is 2 + 3?", "5"), ("Tom has 4 apples and buys 3 more. How many has he?", "7"), ("What is 10 - 4?", "6"),
    ("What is 3 * 3?", "9"), ("Half of 16 is?", "8"),
]  # fmt: skip
SYSTEM = task("gsm8k").system


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> RunPlan:
    data = tmp_path_factory.mktemp("data") / "questions.jsonl"
    lines = [json.dumps({"question": q, "answer": f"So it is.\n#### {a}"}) for q, a in QUESTIONS]
    data.write_text("\n".join(lines))
    decoders = ("softmax", "bok:beta=0.05")
    return RunPlan(
        None, "gsm8k", decoders, n=2, seed=3, data=str(data), batch=4, max_new_tokens=6, every=2, engine="vllm"
    )


@pytest.fixture(scope="module")
def writer(plan):
    return VLLMWriter(plan, SYSTEM)


@pytest.fixture(scope="module")
def beside(plan):
    return TransformersWriter(plan, SYSTEM, "cpu")


def texts(writer, plan):
    """What a writer writes for each arm of a plan, over all questions."""
    writer.plan = plan
    questions = task("gsm8k").load(Path(plan.data), plan.limit)
    return [[t for work in batches(plan, arm, questions) for t in writer.write(work).texts] for arm in plan.arms]


def known(folder) -> list[dict]:
    """The records, sorted, without what another batch or process may change in its last digits."""
    moved = ("seconds", "entropy", "effective_temperature")
    found = [{k: v for k, v in asdict(r).items() if k not in moved} for r in read_run(folder)[2]]
    return sorted(found, key=lambda r: (r["decoder"], r["coupled"], r["question"], r["sample"]))


def test_every_sample_has_a_record_and_a_stopped_run_goes_on(plan, writer, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    times = go(plan, whole, writer)
    assert 0 < times.looking < times.writing
    assert 0.2 * times.writing < times.forward < times.writing - times.looking
    _, about, records = read_run(whole)
    assert "vllm" in about["versions"]
    assert [r.decoder for r in records[:20]] == ["softmax"] * 10 + ["bok:beta=0.05"] * 10
    assert len(records) == 30, "a control, as sharp as bok was"
    assert all(r.decoder.startswith("softmax:temperature=0.") for r in records[20:])
    assert len({r.seed for r in records}) == 10, "the same seeds under every decoder"
    assert all(0 < r.tokens <= 6 and r.finish in ("stop", "length") and r.entropy >= 0 for r in records)
    assert all(r.effective_temperature == pytest.approx(1, abs=1e-3) for r in records[:10])
    assert all(r.effective_temperature < 0.5 for r in records[10:20])

    with pytest.raises(KeyboardInterrupt):
        go(plan, broken, writer, count=2)
    assert 0 < len(read_run(broken)[2]) < 30
    go(plan, broken, writer)
    assert known(broken) == known(whole)
    with pytest.raises(ValueError, match="other settings; engine: 'vllm' there, 'transformers' now"):
        go(replace(plan, engine="transformers"), broken, writer)


def test_the_command_takes_the_engine(plan, writer, tmp_path, capsys):
    asked = replace(plan, decoders=("greedy",), n=1, batch=4, max_new_tokens=2, every=RunPlan.every, seed=0)
    go(asked, tmp_path / "run", writer)
    given = ["evaluate", "--task", "gsm8k", "--data", plan.data, "--out", str(tmp_path / "run"), "-n", "1"]
    given += ["--batch", "4", "--max-tokens", "2"]
    app([*given, "--decoder", "greedy", "--engine", "vllm"], standalone_mode=False)
    assert "nothing was left to do" in capsys.readouterr().out
    for rest, words in [
        (["--decoder", "greedy"], "engine: 'vllm' there, 'transformers' now"),
        (["--decoder", "greedy", "--engine", "vlm"], "unknown engine 'vlm', did you mean 'vllm'?"),
        (["--decoder", "greedy", "--engine", "vllm", "--device", "cpu"], "leave --device out"),
        (["--decoder", "tree-bok", "--engine", "vllm"], "tree-bok counts the samples of a group that share a text"),
    ]:
        with pytest.raises(ValueError, match=re.escape(words)):
            app([*given, *rest], standalone_mode=False)


def test_greedy_texts_are_those_of_transformers(plan, writer, beside):
    plan = replace(plan, decoders=("greedy",), n=1, max_new_tokens=16)
    (found,), (expected,) = texts(writer, plan), texts(beside, plan)
    same = [one == other for one, other in zip(found, expected, strict=True)]
    assert sum(same) >= len(QUESTIONS) - 1, "but for a near tie"


@pytest.mark.parametrize(("limit", "finish"), [(9, "stop"), (3, "stop"), (2, "length")])
def test_where_a_text_ends(plan, writer, beside, limit, finish):
    work = Work(Arm("greedy"), 0, (Question("a", "Say yes.", "yes"),))
    for made in (writer, beside):
        made.plan = replace(plan, n=1, max_new_tokens=limit)
        (found,) = made.write(work).texts
        assert (found.text, found.tokens, found.finish) == ("Yes.", min(limit, 3), finish)


def test_first_tokens_are_measured_as_in_transformers(plan, writer, beside):
    plan = replace(plan, decoders=("softmax", "bok:beta=0.05", "top-p:p=0.8"), max_new_tokens=1)
    for found, expected in zip(texts(writer, plan), texts(beside, plan), strict=True):
        for one, other in zip(found, expected, strict=True):
            assert (one.question, one.sample, one.seed) == (other.question, other.sample, other.seed)
            assert one.entropy == pytest.approx(other.entropy, rel=2e-3, abs=1e-5)
            assert one.effective_temperature == pytest.approx(other.effective_temperature, rel=2e-3)


def test_coupled_texts_are_those_of_transformers(plan, writer, beside):
    """Another batch's last digits grow with every token of a coupled text: only the first are compared."""
    plan = replace(plan, n=4, coupled=(2,), batch=8, max_new_tokens=3, every=1)
    for found, expected in zip(texts(writer, plan), texts(beside, plan), strict=True):
        assert [t.seed for t in found] == [t.seed for t in expected]
        assert len({t.seed for t in found}) == 2 * len(QUESTIONS), "one seed for each group"
        same = [(one, other) for one, other in zip(found, expected, strict=True) if one.text == other.text]
        assert len(same) >= len(found) - 1
        for one, other in same:
            assert (one.tokens, one.finish) == (other.tokens, other.finish)
            assert one.entropy == pytest.approx(other.entropy, rel=1e-2, abs=1e-4)
            assert one.effective_temperature == pytest.approx(other.effective_temperature, rel=1e-2)


def test_a_row_that_its_decoder_did_not_decide_is_no_result(plan, writer, monkeypatch):
    from simplexity.decoders.softmax import Softmax

    def broken(*args, **rest):
        raise RuntimeError("no")

    monkeypatch.setattr(Softmax, "log_distribution", broken)
    with pytest.raises(RuntimeError, match=r"softmax did not decide about every token.*FAILED"):
        texts(writer, replace(plan, limit=1))


def test_nobody_else_can_ask_for_measures(writer):
    with pytest.raises(VLLMValidationError, match="only a program that holds the engine"):
        writer.llm.generate(["Once"], [SamplingParams(extra_args={"decoder": "bok", "measure": 1})], use_tqdm=False)


def test_a_cluster_that_loses_a_worker(plan, writer, tmp_path):
    plan = replace(plan, decoders=("softmax", "greedy"), batch=2)
    go(plan, tmp_path / "alone", writer)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        spread = RayWriter(plan, SYSTEM, "local", workers=2)
        made = []

        def actor(make=spread._actor):
            made.append(make())
            return made[-1]

        spread._actor = actor

        class Murderous:
            def write_all(self, works):
                for number, pair in enumerate(spread.write_all(works)):
                    if number == 0 and len(made) == 2:
                        os.kill(ray.get(made[0].process.remote()), signal.SIGKILL)
                    yield pair

        evaluate(plan, task("gsm8k"), tmp_path / "spread", Murderous)
    finally:
        ray.shutdown()
    assert len(made) == 3, "one worker was replaced, and the others served both decoders"
    assert known(tmp_path / "spread") == known(tmp_path / "alone")
