"""vLLM under our decoders, inside this process: the engine on a CPU, with the embedded model."""

import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from goodness import chi_square
from needed import needed

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that the tests can look at the plug-in
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
vllm = needed("vllm", "vllm")

from vllm import SamplingParams  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality, _load_logitsprocs_plugins  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState, loader  # noqa: E402

from simplexity import Codes, Context, decoder  # noqa: E402
from simplexity.embedded import unpacked  # noqa: E402
from simplexity.engines.vllm import DecoderProcessor  # noqa: E402

SPECS = ["softmax:temperature=1.5", "top-p:p=0.9", "sparsemax:lam=3", "bok:temperature=3,lam=1,beta=0.5"]
PROMPT = "The best thing about"
SETTINGS = {
    "enforce_eager": True, "max_model_len": 256, "dtype": "float32", "generation_config": "vllm",
    "logprobs_mode": "processed_logprobs", "max_logprobs": -1, "max_num_seqs": 64, "seed": 0,
}  # fmt: skip


def params(spec=None, place=None, **rest):
    given = {"max_tokens": 1, "detokenize": False, **rest}
    extra = {} if spec is None else {"decoder": spec}
    extra |= {} if place is None else dict(zip(("group", "index", "size"), place, strict=False))
    return SamplingParams(**given, extra_args=extra or None)


@pytest.fixture(scope="module")
def llm():
    return vllm.LLM(model=str(unpacked()), **SETTINGS)


def written(llm, wanted):
    prompts = [PROMPT] * len(wanted)
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, wanted, use_tqdm=False)]


def log_probs(llm, spec=None):
    """What vLLM reports for every first token `[V]`; −9999 and below stand for −inf."""
    (out,) = llm.generate([PROMPT], [params(spec, logprobs=-1)], use_tqdm=False)
    found = torch.full((len(out.outputs[0].logprobs[0]),), -torch.inf, dtype=torch.float64)
    for token, entry in out.outputs[0].logprobs[0].items():
        found[token] = entry.logprob
    return found


@pytest.fixture(scope="module")
def scores(llm):
    """The engine's own logits, up to a constant."""
    return log_probs(llm)


def plug_in(llm) -> DecoderProcessor:
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    (found,) = [p for p in runner.input_batch.logitsprocs.all if isinstance(p, DecoderProcessor)]
    return found


def test_each_request_of_a_mixed_batch_has_its_own_distribution(llm, scores):
    kinds, count = [None, *SPECS], 3000
    found = written(llm, [params(spec, seed=seed) for seed in range(count) for spec in kinds])
    for number, spec in enumerate(kinds):
        q = decoder(spec or "softmax").distribution(scores)
        assert (q > 0.01).sum() > 1, "nothing to draw"
        assert chi_square([tokens[0] for tokens in found[number :: len(kinds)]], q) > 1e-4, spec
    assert plug_in(llm).tally.read()["OK"] >= count * len(SPECS)


@pytest.mark.parametrize("spec", SPECS)
def test_log_probabilities_are_log_q(llm, scores, spec):
    q, found = decoder(spec).distribution(scores), log_probs(llm, spec)
    assert (found[q == 0] < -9000).all()
    likely = q > 1e-12
    torch.testing.assert_close(found[likely], q[likely].log(), atol=1e-3, rtol=0)


def test_the_requests_of_a_group_are_coupled(llm, scores):
    size, groups, spec = 8, 40, "softmax:temperature=0.7"
    wanted = [params(spec, (group, index, size), max_tokens=3) for group in range(groups) for index in range(size)]
    mixed = [one for pair in zip(wanted, [params(seed=1)] * len(wanted), strict=True) for one in pair]
    found = written(llm, mixed)[::2]
    q = decoder(spec).distribution(scores).expand(groups * size, -1)
    expected = Codes.spread(range(groups), size).draw(q)
    same = sum(tokens[0] == token for tokens, token in zip(found, expected.tolist(), strict=True))
    assert same >= groups * size - 2, "logits of other batches differ in their last digits"
    assert written(llm, [params(spec, (4, index, size)) for index in range(size)]) == [
        tokens[:1] for tokens in found[4 * size : 5 * size]
    ], "a group depends on its seed alone"
    independent = written(llm, [params(spec, seed=seed) for seed in range(groups * size)])
    distinct = [
        sum(len({tokens[0] for tokens in texts[i : i + size]}) for i in range(0, groups * size, size))
        for texts in (found, independent)
    ]
    assert distinct[0] > distinct[1] + 10


PARTS = """
import json, sys, torch
from vllm import LLM, SamplingParams
from simplexity import Codes, decoder
model, settings = json.loads(sys.argv[1])
llm = LLM(model=model, **settings, max_num_batched_tokens=32, enable_chunked_prefill=True)
prompt = {"prompt_token_ids": [100 + 7 * i for i in range(150)]}
given = dict(max_tokens=1, detokenize=False)
(out,) = llm.generate([prompt], [SamplingParams(**given, logprobs=-1)], use_tqdm=False)
seen = out.outputs[0].logprobs[0]
scores = torch.tensor([seen[i].logprob for i in range(len(seen))], dtype=torch.float64)
extra = [{"decoder": "softmax:temperature=2", "group": 3, "index": index, "size": 8} for index in range(8)]
outs = llm.generate([prompt] * 8, [SamplingParams(**given, extra_args=one) for one in extra], use_tqdm=False)
q = decoder("softmax:temperature=2").distribution(scores).expand(8, -1)
print("FOUND", json.dumps([[o.outputs[0].token_ids[0] for o in outs], Codes.spread(3, 8).draw(q).tolist()]))
"""


def test_a_prompt_read_in_parts_does_not_move_the_codes():
    settings = {**SETTINGS, "max_num_seqs": 8}
    given = [sys.executable, "-c", PARTS, json.dumps([str(unpacked()), settings])]
    done = subprocess.run(given, capture_output=True, text=True, timeout=900)
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND")), None)
    assert line is not None, done.stderr[-3000:]
    found, expected = json.loads(line.removeprefix("FOUND"))
    assert len(set(expected)) > 4
    assert found == expected


def test_penalties_of_a_decoder_see_the_tokens_so_far(llm):
    wanted = params("greedy:presence=1000", max_tokens=12, ignore_eos=True)
    (tokens,) = written(llm, [wanted])
    prompt = llm.get_tokenizer().encode(PROMPT)
    assert len({*tokens, *prompt}) == 12 + len(set(prompt)), "nothing may be written twice"


def test_what_a_request_asks_in_vain_is_refused(llm):
    for spec, rest, words in [
        ("bok:beta=-1", {}, "beta must be"),
        ("nucleus", {}, "unknown decoder"),
        (3, {}, "must be a spec"),
        ("bok", {"temperature": 0.7}, "temperature=0.7 would change"),
        ("bok", {"top_p": 0.9}, "top_p=0.9 would change"),
        ("bok", {"min_p": 0.1, "top_k": 5}, "top_k=5, min_p=0.1 would change"),
        ("bok", {"repetition_penalty": 1.2}, "repetition_penalty=1.2 would change"),
        ("guidance", {}, "another model's logits"),
        ("tree-bok", {}, "counts the samples of a group"),
        (None, {"place": (1, 0, 2)}, "need a decoder beside"),
        ("bok", {"place": (1, 2, 2)}, "0 <= index < size"),
        ("bok", {"place": (1, 2)}, "three whole numbers"),
        ("bok", {"place": (1, 0, 2), "n": 2}, "one request for each index"),
    ]:
        with pytest.raises(VLLMValidationError, match=words):
            llm.generate([PROMPT], [params(spec, **rest)], use_tqdm=False)
    (plain,) = written(llm, [params(temperature=0.7, top_p=0.5)])
    assert len(plain) == 1


def test_finished_requests_leave_nothing_behind(llm):
    written(llm, [params(spec, max_tokens=5) for spec in SPECS * 4])
    written(llm, [params()])  # vLLM tells of the removed rows at its next step
    assert plug_in(llm).requests == {}


PLAIN = """
import importlib.metadata, json, os, sys
found = importlib.metadata.entry_points
if sys.argv[1] == "without":
    def entry_points(**given):
        entries = found(**given)
        if not given.get("group", "").startswith("vllm"):
            return entries
        return importlib.metadata.EntryPoints(e for e in entries if not e.value.startswith("simplexity"))
    importlib.metadata.entry_points = entry_points
from vllm import LLM, SamplingParams
model, settings = json.loads(sys.argv[2])
llm = LLM(model=model, **settings)
wanted = [SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=seed) for seed in range(8)]
outs = llm.generate(["Once upon a time"] * 8, wanted, use_tqdm=False)
seen = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
names = [type(p).__name__ for p in seen.input_batch.logitsprocs.all]
print("FOUND", json.dumps([names, [list(o.outputs[0].token_ids) for o in outs]]))
"""


def test_plain_requests_are_those_of_vllm_without_the_plug_in(tmp_path):
    file = tmp_path / "plain.py"
    file.write_text(PLAIN)
    results = {}
    for how in ("with", "without"):
        command = [sys.executable, str(file), how, json.dumps([str(unpacked()), SETTINGS])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
        results[how] = json.loads(line.removeprefix("FOUND "))
    assert "DecoderProcessor" in results["with"][0]
    assert "DecoderProcessor" not in results["without"][0]
    assert results["with"][1] == results["without"][1]
    assert len({tuple(tokens) for tokens in results["with"][1]}) > 1


SPECULATIVE = """
import json, sys
from vllm import LLM, SamplingParams
model, settings = json.loads(sys.argv[1])
drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
llm = LLM(model=model, speculative_config=drafts, **settings)
print("STARTED")
try:
    llm.generate(["Once"], [SamplingParams(max_tokens=1, extra_args={"decoder": "bok"})], use_tqdm=False)
except Exception as error:
    print("REFUSED", error)
print("PLAIN", len(llm.generate(["Once"], [SamplingParams(max_tokens=1)], use_tqdm=False)))
"""


def test_speculative_decoding_is_noticed_at_the_start(tmp_path):
    file = tmp_path / "speculative.py"
    file.write_text(SPECULATIVE)
    command = [sys.executable, str(file), json.dumps([str(unpacked()), SETTINGS])]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    start, rest = done.stdout.split("STARTED")
    assert "requests with a decoder will be refused" in start
    assert "REFUSED a decoder cannot be served here" in rest
    assert "PLAIN 1" in rest


class TestRowsOfTheFirstRunner:
    """The real class and the real updates of a batch, without a model."""

    def made(self):
        return DecoderProcessor(SimpleNamespace(), torch.device("cpu"), False)

    def update(self, processor, added=(), removed=(), moved=()):
        rows = [(row, params(spec), [1, 2], []) for row, spec in added]
        processor.update_state(BatchUpdate(8, list(removed), rows, list(moved)))

    def test_rows_that_cannot_be_solved_pass_through(self, caplog):
        processor = self.made()
        self.update(processor, [(0, "bok"), (1, "bok"), (2, None), (3, "top-k:k=1")])
        logits = torch.randn(4, 50)
        logits[1, 3] = torch.nan
        before = logits.clone()
        logger = logging.getLogger("simplexity.engines.rows_by_decoder")
        with caplog.at_level(logging.WARNING, logger.name):
            assert processor.apply(logits) is logits
        torch.testing.assert_close(logits[[1, 2]], before[[1, 2]], equal_nan=True, atol=0, rtol=0)
        torch.testing.assert_close(logits[0].exp(), decoder("bok").distribution(before[0]))
        assert logits[3].isfinite().sum() == 1
        assert processor.tally.read() == {"OK": 2, "NAN": 1, "NO_DECODER": 1}
        assert "NaN among the scores" in caplog.text

    def test_rows_move_with_their_requests(self):
        processor, logits = self.made(), torch.randn(4, 50)
        self.update(processor, [(0, "top-k:k=1"), (1, None), (2, "top-k:k=2")])
        self.update(processor, moved=[(0, 1, MoveDirectionality.SWAP)])
        self.update(processor, removed=[2], moved=[(1, 3, MoveDirectionality.UNIDIRECTIONAL)])
        assert processor.apply(logits.clone()).isfinite().sum(-1).tolist() == [50, 50, 50, 1]
        self.update(processor, [(3, None)])
        plain = logits.clone()
        assert torch.equal(processor.apply(plain), logits)
        assert processor.requests == {}

    def test_vllm_finds_it(self):
        assert DecoderProcessor in _load_logitsprocs_plugins()


class TestSlotsOfTheSecondRunner:
    """Its real interface on CPU tensors; the runner itself needs a GPU."""

    def test_vllm_finds_it(self):
        assert DecoderProcessor in loader._load_v2_logitsprocs_plugins()

    def states(self, table, prompts=None):
        lengths = SimpleNamespace(gpu=prompts)
        return LogitsProcRequestState(
            torch.device("cpu"),
            len(table),
            50,
            SimpleNamespace(gpu=table),
            lengths,
            SimpleNamespace(),
            SimpleNamespace(),
        )

    def context(self, slots, lengths, expanded=None):
        per_row = slots if expanded is None else expanded
        return LogitsContext(
            expanded_idx_mapping=torch.tensor(per_row),
            idx_mapping=torch.tensor(slots),
            idx_mapping_np=torch.tensor(slots).numpy(),
            expanded_local_pos=torch.zeros(len(per_row), dtype=torch.int64),
            input_ids=torch.zeros(len(per_row), dtype=torch.int64),
            pos=torch.tensor(lengths) - 1,
            seq_lens_upper_bound_np=torch.tensor(lengths).numpy(),
        )

    def test_rows_follow_their_slots(self):
        processor = DecoderProcessor(SimpleNamespace(), self.states(torch.zeros(8, 9, dtype=torch.int32)))
        assert processor.add_request(5, params("top-k:k=1"))
        assert processor.add_request(2, params("top-k:k=2"))
        assert not processor.add_request(0, params())
        logits = torch.randn(3, 50)
        made = processor.apply(logits.clone(), self.context([2, 0, 5], [4, 4, 4]))
        assert made.isfinite().sum(-1).tolist() == [2, 50, 1]
        drafts = processor.apply(logits.clone(), self.context([5, 0], [4, 4], expanded=[5, 5, 0]))
        assert drafts.isfinite().sum(-1).tolist() == [1, 1, 50]
        assert not processor.add_request(5, params())
        assert torch.equal(processor.apply(logits[:1].clone(), self.context([5], [4])), logits[:1])

    def test_penalties_see_the_tokens_of_the_slot(self):
        table = torch.zeros(4, 9, dtype=torch.int32)
        table[3, :5], table[1, :2] = torch.tensor([7, 8, 9, 7, 30]), torch.tensor([4, 5])
        processor, spec = DecoderProcessor(SimpleNamespace(), self.states(table)), "softmax:presence=3,last=4"
        for slot in (3, 1):
            processor.add_request(slot, params(spec))
        logits = torch.randn(2, 50)
        made = processor.apply(logits.clone(), self.context([3, 1], [5, 2]))
        seen = torch.tensor([[7, 8, 9, 7, 30], [-1, -1, -1, 4, 5]])
        expected = decoder(spec).distribution(logits, Context(tokens=seen))
        torch.testing.assert_close(made.exp(), expected)

    def test_a_groups_codes_follow_their_slots(self):
        prompts = torch.full((8,), 5, dtype=torch.int32)
        processor = DecoderProcessor(SimpleNamespace(), self.states(torch.zeros(8, 9, dtype=torch.int32), prompts))
        slots = [5, 2, 7]
        for index, slot in enumerate(slots):
            assert processor.add_request(slot, params("softmax", (9, index, 3)))
        codes, expected = Codes.spread(9, 3), {}
        for length in (3, 5, 5, 6, 7):  # 3: a part of the prompt; 5 twice: a token thrown away
            logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(length))
            made = processor.apply(logits.clone(), self.context(slots, [length] * 3))
            if length >= 5 and length not in expected:
                expected[length] = decoder("softmax").sample(logits, codes=codes).tolist()
            if length >= 5:
                assert (made == 0).nonzero()[:, 1].tolist() == expected[length]
