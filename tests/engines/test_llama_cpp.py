"""llama.cpp under our decoders, with the embedded model's GGUF file and llama-cpp-python's real sampler chain."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from goodness import chi_square
from needed import needed
from simplexity import Decoder, NegEntropy, Problem, decoder
from simplexity.draw import derive_seeds
from simplexity.engines.llama_cpp import NEUTRAL, SETTINGS, DecoderProcessor, generate, prompt_ids, stream

pytestmark = pytest.mark.xdist_group("llama")

SPECS = ["softmax", "top-p:p=0.9", "sparsemax:lam=3", "bok:temperature=3,lam=1,beta=0.5"]
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass(frozen=True)
class Stumbling(Decoder):
    """Softmax, until it is called for the third time."""

    name = "stumbling"
    calls = []  # noqa: RUF012
    error: type[BaseException] = ArithmeticError  # pyright: ignore

    def problem(self, scores, context=None):
        self.calls.append(1)
        if len(self.calls) == 3:
            raise self.error("the third call")
        return Problem(scores, NegEntropy())

    def __post_init__(self):
        self.calls.clear()


@pytest.fixture(scope="module")
def llama():
    llama_cpp = needed("llama", "llama_cpp")
    from simplexity.embedded import gguf_file

    made = llama_cpp.Llama(str(gguf_file()), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
    yield made
    made.close()


@pytest.fixture
def when(llama):
    """The engine after the prompt "When", and the logits it hands to a processor."""
    llama.reset()
    llama.eval(prompt_ids(llama, "When"))
    llama._sampler = None  # a completion leaves its own behind
    seen = []

    def look(ids, scores):
        seen.append((scores.strides, torch.tensor(scores)))
        return scores

    llama.sample(logits_processor=[look], temp=-1.0)
    (strides, logits), = seen  # fmt: skip
    assert strides == (12,)
    return logits


@pytest.mark.parametrize("spec", SPECS)
def test_first_tokens_follow_q(llama, when, spec):
    q = decoder(spec).distribution(when)
    assert (q > 0.01).sum() > 1, "nothing to draw"
    processor, tokens = DecoderProcessor(spec, engine_draws=True), []
    with processor:
        for seed in range(3000):
            llama.set_seed(seed)
            tokens.append(llama.sample(logits_processor=[processor], temp=-1.0))
    assert processor.step == 3000
    assert chi_square(tokens, q) > 1e-4


def test_own_draws_follow_q_whatever_the_engine_is_set_to(llama, when):
    spec, tokens = SPECS[-1], []
    for seed in range(400):
        with DecoderProcessor(spec, seed) as processor:
            tokens.append(llama.sample(logits_processor=[processor], temp=0.3, top_k=2, repeat_penalty=1.5))
    assert chi_square(tokens, decoder(spec).distribution(when)) > 1e-4
    assert tokens == [int(decoder(spec).sample(when, seeds=seed)) for seed in range(400)]


def test_neutral_settings_at_temperature_1_are_those_at_minus_1(llama, when):
    cuts = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    drawn = []
    for settings in ({"temp": -1.0}, {"temp": 1.0, **cuts}):
        processor = DecoderProcessor("sparsemax:lam=3", engine_draws=True)
        with processor:
            drawn.append([])
            for seed in range(60):
                llama.set_seed(seed)
                drawn[-1].append(llama.sample(logits_processor=[processor], **settings))
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 2


def test_strides_leave_the_neighbours_alone():
    numpy = pytest.importorskip("numpy")  # torch brings it or not; every engine here has it
    record = numpy.zeros(500, dtype=[("id", "i4"), ("logit", "f4"), ("p", "f4")])
    record["id"], record["p"] = numpy.arange(500), 0.25
    s = torch.randn(500)
    for processor in (DecoderProcessor("bok", engine_draws=True), DecoderProcessor("bok", seed=3)):
        record["logit"] = s.numpy()
        view = record["logit"]
        assert view.strides == (12,)
        assert processor(numpy.arange(4, dtype="i4"), view) is view
        assert (record["id"] == numpy.arange(500)).all()
        assert (record["p"] == 0.25).all()
        if processor.engine_draws:
            torch.testing.assert_close(torch.tensor(view).exp(), decoder("bok").distribution(s))
        else:
            assert (view > -numpy.inf).nonzero()[0].tolist() == [int(decoder("bok").sample(s, seeds=3))]


@pytest.mark.parametrize("options", [{"engine_draws": True}, {"seed": 1}])
def test_a_nan_among_the_logits_is_an_error(options):
    numpy = pytest.importorskip("numpy")
    scores = numpy.zeros(50, dtype="f4")
    scores[7] = numpy.nan
    with pytest.raises(ValueError, match="a NaN among the scores"):
        DecoderProcessor("softmax", **options)(numpy.arange(3, dtype="i4"), scores)


def test_penalties_see_the_text_so_far():
    numpy = pytest.importorskip("numpy")
    scores = numpy.zeros(4, dtype="f4")
    DecoderProcessor("softmax:presence=100", engine_draws=True)(numpy.array([0, 1, 3], dtype="i4"), scores)
    assert scores.argmax() == 2
    assert scores.max() == pytest.approx(0.0, abs=1e-6)


def test_greedy_is_the_engines_greedy(llama):
    for prompt in ("The capital of France is", "Once upon a time"):
        llama.reset()
        theirs = llama(prompt, max_tokens=24, temperature=0.0)["choices"][0]["text"]
        assert generate(llama, prompt, "greedy", max_tokens=24)[0].text == theirs
        assert len(theirs) > 20
    llama.reset()
    theirs = llama.create_chat_completion(CHAT, max_tokens=24, temperature=0.0)["choices"][0]
    (ours,) = generate(llama, CHAT, "greedy", max_tokens=24)
    assert ours.text == theirs["message"]["content"]
    assert ours.finished == (theirs["finish_reason"] == "stop")


@pytest.mark.parametrize("engine_draws", [False, True])
def test_texts_come_back_with_their_seeds(llama, engine_draws):
    options = {"max_tokens": 16, "engine_draws": engine_draws}
    three = generate(llama, "Once upon a", "top-p", n=3, seed=5, **options)
    assert len({found.text for found in three}) == 3
    assert [found.decoder for found in three] == ["top-p"] * 3
    generate(llama, "Something else entirely", "softmax", max_tokens=4)
    (one,) = generate(llama, "Once upon a", "top-p", n=1, seed=5, **options)
    assert one == three[0]
    assert generate(llama, "Once upon a", "top-p", n=3, seed=5, **options) == three
    assert generate(llama, "Once upon a", "top-p", n=3, seed=6, **options) != three
    again = "".join(stream(llama, "Once upon a", "top-p", seed=three[2].seed, **options))
    assert again == three[2].text


def test_each_token_is_the_decoders_draw_at_its_step(llama):
    (found,) = generate(llama, "Once upon a", "bok:temperature=2", seed=8, max_tokens=8)
    seed = int(derive_seeds(torch.tensor([8]), 1)[0])
    assert found.seed == seed
    ids, tokens = prompt_ids(llama, "Once upon a"), []
    llama.reset()
    llama.eval(ids[:-1])
    for step in range(8):
        llama.eval([(ids + tokens)[-1]])
        logits = torch.tensor(llama._ctx.get_logits()[: llama.n_vocab()])
        tokens.append(int(decoder("bok:temperature=2").sample(logits, seeds=seed, step=step)))
    assert llama.detokenize(tokens, prev_tokens=ids).decode() == found.text


def test_every_text_starts_from_the_same_logits_to_the_last_bit(llama):
    seen = []

    @dataclass(frozen=True)
    class Looking(Decoder):
        name = "looking"

        def problem(self, scores, context=None):
            if context is not None and context.step == 0:
                seen.append(scores.clone())
            return Problem(scores, NegEntropy())

    prompt = "Once upon a time there was a small boat on a very wide and"
    for before in ("Once upon a time there was a small house", "word " * 505):  # the latter fills the context
        generate(llama, before, "softmax", max_tokens=3)
        generate(llama, prompt, Looking(), n=2, max_tokens=2, seed=1)
    assert len(seen) == 4
    for logits in seen[1:]:
        assert torch.equal(logits, seen[0])


def test_where_the_engine_draws_its_settings_are_neutral(llama):
    prompt, spec, cuts = "Once upon a", "softmax:temperature=2", {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for found in generate(llama, prompt, spec, n=4, max_tokens=6, seed=3, engine_draws=True):
        assert found.seed is not None
        with DecoderProcessor(spec, engine_draws=True) as processor:
            own = {"seed": found.seed % (2**32 - 1), "temperature": 1.0, "logits_processor": [processor], **cuts}
            theirs = llama(prompt_ids(llama, prompt), max_tokens=6, **own)
        assert theirs["choices"][0]["text"] == found.text


def test_stop_strings_and_ends(llama):
    (whole,) = generate(llama, "Once upon a", "greedy", max_tokens=12)
    word = whole.text.split()[3]
    (cut,) = generate(llama, "Once upon a", "greedy", max_tokens=12, stop=[word])
    assert not whole.finished
    assert cut.finished
    assert cut.text == whole.text[: whole.text.index(word)]


@pytest.mark.parametrize("engine_draws", [False, True])
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_what_the_decoder_raises_is_raised(llama, error, engine_draws):
    with pytest.raises(error, match="the third call"):
        generate(llama, "Once", Stumbling(error=error), max_tokens=50, engine_draws=engine_draws)
    assert len(Stumbling.calls) == 3
    assert llama.n_tokens < 8, "the text went on after the error"
    with pytest.raises(error, match="the third call"):
        list(stream(llama, "Once", Stumbling(error=error), max_tokens=50, engine_draws=engine_draws))
    assert len(generate(llama, "Once", "greedy", max_tokens=4)[0].text) > 3, "the engine works on"


def test_outside_a_with_the_error_is_printed_and_stays(llama, monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    processor = DecoderProcessor(Stumbling(), seed=1)
    llama("Once", max_tokens=6, logits_processor=[processor], **SETTINGS)
    assert len(printed) == 4  # at the third token, and at every one after it
    assert {type(p.exc_value) for p in printed} == {ArithmeticError}
    assert processor.failed()
    with pytest.raises(ArithmeticError), processor:
        pass


def test_a_decoder_that_was_dropped_is_noticed(llama):
    with pytest.raises(ValueError, match="never called"), DecoderProcessor("softmax") as processor:
        llama("Once", max_tokens=2, logits_processor=[processor], logit_bias={5: 1.0}, **SETTINGS)
    with pytest.raises(ValueError, match="never called"), DecoderProcessor("softmax") as processor:
        llama.sample(logits_processor=[processor])


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 0.8}, {"temperature": 0.0}, {"top_k": 40}, {"top_p": 0.95}, {"min_p": 0.05}, {"typical_p": 0.5},
        {"tfs_z": 0.9}, {"mirostat_mode": 2}, {"frequency_penalty": 0.1}, {"presence_penalty": 0.1},
        {"repeat_penalty": 1.1}, {"logit_bias": {3: 1.0}}, {"grammar": object()}, {"logits_processor": [len]},
        {"stopping_criteria": [len]},
    ],
    ids=lambda setting: next(iter(setting)),
)  # fmt: skip
def test_distorting_settings_are_refused(setting):
    assert set(setting) <= set(NEUTRAL)
    for function in (generate, stream):
        with pytest.raises(ValueError, match=f"{next(iter(setting))}=.* would change the decoder's distribution"):
            function(None, "Once", **setting)


def test_neutral_settings_are_taken(llama):
    settings = {name: values[-1] for name, values in NEUTRAL.items()}
    plain = generate(llama, "Once", "softmax", max_tokens=6, seed=2)
    assert generate(llama, "Once", "softmax", max_tokens=6, seed=2, **settings) == plain


def test_what_cannot_be_done_is_refused(llama):
    for wrong, words in (
        ({"prompt": ""}, "the prompt is empty"),
        ({"n": 0}, "at least 1"),
        ({"max_tokens": 0}, "at least 1"),
        ({"stream": True}, "there is stream"),
        ({"decoder": "guidance"}, "needs another model's logits"),
        ({"decoder": "top-q"}, "did you mean"),
        ({"prompt": "word " * 600}, "reads 512 at most"),
    ):
        with pytest.raises(ValueError, match=words):
            generate(llama, **{"prompt": "Once", **wrong})
    with pytest.raises(ValueError, match="a seed or engine_draws"):
        DecoderProcessor("softmax", seed=1, engine_draws=True)


def test_the_example(llama):
    path = Path(__file__).parents[2] / "examples" / "llama_cpp_decoders.py"
    assert len(path.read_text().splitlines()) < 40
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    lines = done.stdout.strip().splitlines()
    assert sum(line.startswith("bok:temperature=0.8  ") for line in lines) == 3
