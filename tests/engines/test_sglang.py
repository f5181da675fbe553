"""SGLang's custom logit processor: the hand-over with SGLang's own classes, on a CPU. No server is started here."""

import ast
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scipy import stats

from needed import needed
from simplexity import decoder
from simplexity.engines import rows_by_decoder, sglang
from simplexity.engines.sglang import DecoderProcessor, main, request


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(sglang, "TALLY", rows_by_decoder.Tally())
    rows_by_decoder._told.clear()


@pytest.fixture
def processors():
    return needed("sglang", "sglang.srt.sampling.custom_logit_processor")


def scores(rows=4, size=400):
    return 3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(4))


def asking(*specs):
    return [None if spec is None else {"decoder": spec} for spec in specs]


def test_each_request_gets_its_decoder():
    s = scores(6)
    logits = s.clone()
    given = [*asking("bok:k=16", "top-p", None, "bok:k=16", {"decoder": "top-k", "k": 3}), {"other": 1}]
    made = DecoderProcessor()(logits, given)
    assert made is logits
    for row, spec in enumerate(["bok:k=16", "top-p", None, "bok:k=16", "top-k:k=3", None]):
        q = s[row].softmax(-1) if spec is None else decoder(spec).distribution(s[row])
        torch.testing.assert_close(logits[row].softmax(-1), q, atol=1e-6, rtol=1e-4)
    assert torch.equal(logits[[2, 5]], s[[2, 5]])
    assert sglang.TALLY.read() == {"OK": 4, "NO_DECODER": 2}


def test_bad_rows_pass_through_and_are_counted(caplog):
    s = scores(4)
    s[1, 7] = torch.nan
    logits = s.clone()
    DecoderProcessor()(logits, asking("softmax", "softmax", "no-such-decoder", "softmax"))
    torch.testing.assert_close(logits[1:3], s[1:3], equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(logits[3], s[3].log_softmax(-1))
    assert sglang.TALLY.read() == {"OK": 2, "NAN": 1, "FAILED": 1}
    assert "1 rows left as the engine made them: a NaN" in caplog.text
    assert [r.args[0] for r in caplog.records if r.levelno == logging.ERROR] == ["no-such-decoder"]


def test_without_parameters_nothing_happens():
    s = scores()
    assert torch.equal(DecoderProcessor()(s.clone(), None), s)
    assert torch.equal(DecoderProcessor()(s.clone(), [None, "odd", {}, {"decoder": None}]), s)  # pyright: ignore


def test_the_request_is_neutral_and_refuses_what_is_not():
    body = request("bok:k=16", "Hi", max_new_tokens=7, custom_params={"mine": 1})
    assert body["text"] == "Hi"
    assert body["sampling_params"] == {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": 7,
        "custom_params": {"mine": 1, "decoder": "bok:k=16"},
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"top_p=0.9 would change"):
        request("bok", "Hi", top_p=0.9)
    with pytest.raises(ValueError, match=r"temperature=0.0 would change"):
        request("bok", "Hi", temperature=0.0)
    with pytest.raises(ValueError, match="guidance needs another model's logits"):
        request("guidance", "Hi")
    with pytest.raises(ValueError, match="its own penalties"):
        request("softmax:presence=0.5", "Hi")
    assert request("softmax", "Hi", presence_penalty=0.5)["sampling_params"]["presence_penalty"] == 0.5
    with pytest.raises(ValueError, match="temperature must be"):
        request({"decoder": "softmax", "temperature": [1.0, 2.0]}, "Hi")


def test_the_command_prints_a_request(capsys):
    main(["top-p:p=0.5", "Once", "--max-new-tokens", "3"])
    body = json.loads(capsys.readouterr().out)
    assert body["sampling_params"]["custom_params"] == {"decoder": "top-p:p=0.5"}
    with pytest.raises(SystemExit):
        main(["top-q", "Once"])
    assert "did you mean" in capsys.readouterr().err


def test_the_command_names_a_class_that_a_server_can_import(processors):
    command = [sys.executable, "-m", "simplexity.engines.sglang", "bok:k=16", "Hi"]
    body = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    made = processors.CustomLogitProcessor.from_str(body["custom_logit_processor"])
    assert type(made) is DecoderProcessor


def test_sglang_pickles_the_same_class(processors):
    theirs = processors.CustomLogitProcessor.to_str.__func__(DecoderProcessor)
    for text in (theirs, DecoderProcessor.to_str()):
        assert type(processors.CustomLogitProcessor.from_str(text)) is DecoderProcessor
    assert not processors.supports_sampling_mask(DecoderProcessor.to_str())


def test_sglang_takes_the_sampling_parameters(processors):
    kinds = needed("sglang", "sglang.srt.sampling.sampling_params")
    body = request("bok:k=16", "Hi", max_new_tokens=7)
    params = kinds.SamplingParams(**json.loads(json.dumps(body))["sampling_params"])
    params.verify(vocab_size=100)
    assert (params.temperature, params.top_p, params.min_p, params.top_k) == (1.0, 1.0, 0.0, kinds.TOP_K_ALL)
    assert params.custom_params == {"decoder": "bok:k=16"}


def test_a_batch_goes_through_sglangs_own_sampling(processors):
    """SGLang's batch, its application of processors, its temperature and softmax; then draws, against q."""
    info = needed("sglang", "sglang.srt.sampling.sampling_batch_info")
    specs = ["softmax", "top-p:p=0.7", None, "sparsemax", "bok", "bok"]
    s = scores(len(specs), 60)
    rows = [i for i, spec in enumerate(specs) if spec is not None]
    entry = info.ProcessorEntry(
        processor=processors.CustomLogitProcessor.from_str(request("bok", "Hi")["custom_logit_processor"]),
        rows=rows,
        indices=info._rows_to_device_indices(rows, "cpu", False),
    )
    ones = torch.ones(len(specs), 1)
    batch = info.SamplingBatchInfo(
        temperatures=ones, top_ps=ones, top_ks=ones, min_ps=ones * 0, is_all_greedy=False, is_any_greedy=False,
        need_top_p_sampling=False, need_top_k_sampling=False, need_min_p_sampling=False, vocab_size=60, device="cpu",
        has_custom_logit_processor=True, custom_logit_processor={1: entry}, custom_params=asking(*specs),
    )  # fmt: skip
    logits = s.clone()
    their_own("apply_custom_logit_processor")(logits, batch)
    assert torch.equal(logits[2], s[2])
    probs = logits.div_(batch.temperatures).softmax(-1)
    for row in rows:
        q = decoder(specs[row]).distribution(s[row])
        torch.testing.assert_close(probs[row], q, atol=1e-6, rtol=1e-4)
        drawn = torch.multinomial(probs[row], 20_000, replacement=True)
        seen, hoped = torch.bincount(drawn, minlength=60).double(), q.double() * 20_000
        assert seen[q == 0].sum() == 0
        common = hoped >= 5
        if common.sum() > 1:
            hoped = hoped[common] * seen[common].sum() / hoped[common].sum()
            assert stats.chisquare(seen[common], hoped).pvalue > 1e-4
    # a speculative step brings several rows a request
    wide = s.repeat_interleave(2, 0)
    their_own("apply_custom_logit_processor")(wide, batch, num_tokens_in_batch=2)
    torch.testing.assert_close(wide[::2][rows].softmax(-1), probs[rows], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(wide[1::2][rows].softmax(-1), probs[rows], atol=1e-6, rtol=1e-4)


def their_own(name):
    """A function of SGLang's sampler, from its source: the whole module asks for a GPU's packages."""
    root = Path(needed("sglang", "sglang").__file__).parent
    tree = ast.parse((root / "srt" / "layers" / "sampler.py").read_text())
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    names = {"torch": torch, "logger": logging.getLogger("sglang"), "SamplingBatchInfo": object}
    exec(compile(ast.Module(wanted, []), "sampler.py", "exec"), names)
    return names[name]
