"""transformers' `model.generate` under our decoders, on the embedded model."""

import io
import math

import pytest
import torch
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, SuppressTokensLogitsProcessor

from goodness import chi_square
from simplexity import decoder, effective_temperature
from simplexity.draw import derive_seeds
from simplexity.engines.roomy_cache import roomy_cache
from simplexity.engines.transformers import DecoderProcessor, Sampling, distorting, generate
from simplexity.show.streaming import Stream

pytestmark = pytest.mark.xdist_group("model")

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain in one sentence why the sky is blue.",
    "List three prime numbers.",
    "Tell me a joke about a cat and a mouse who share a house by the sea.",
]


@pytest.fixture
def spoilt(smollm):
    """The model with a generation_config that would change every distribution."""
    config = smollm.model.generation_config
    wishes = {"top_k": 2, "top_p": 0.5, "temperature": 0.3, "repetition_penalty": 1.7, "suppress_tokens": [28, 30]}
    before = {name: getattr(config, name) for name in wishes}
    for name, value in wishes.items():
        setattr(config, name, value)
    yield smollm
    for name, value in before.items():
        setattr(config, name, value)


@pytest.mark.parametrize(
    "spec",
    [
        "top-p:p=0.9",
        *(
            pytest.param(spec, marks=pytest.mark.slow)
            for spec in ("softmax", "sparsemax:lam=3", "bok:temperature=3,lam=1,beta=0.5")
        ),
    ],
)
def test_first_tokens_follow_q(smollm, spec):
    ids = smollm.tokenizer("When", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        scores = smollm.model(ids).logits[0, -1].float()
    q = decoder(spec).distribution(scores)
    assert (q > 0.01).sum() > 1, "nothing to draw"
    drawn = []
    for part in range(5):
        found = generate(smollm.model, ids, spec, n=1000, max_new_tokens=1, seeds=[part])
        drawn.append(found.tokens[:, 0])
    assert chi_square(torch.cat(drawn), q) > 1e-4


def test_the_models_own_settings_are_not_applied_and_named(smollm, spoilt):
    inputs = smollm.encode(PROMPTS[:2])
    with pytest.warns(UserWarning, match=r"top_k=2.*repetition_penalty=1.7"):
        found = generate(spoilt.model, spec_of := inputs["input_ids"], "softmax", 3, 12, [5, 6], **mask(inputs))
    assert set(found.settings) == {"top_k", "top_p", "temperature", "repetition_penalty", "suppress_tokens"}
    for name in found.settings:
        setattr(smollm.model.generation_config, name, None)
    assert torch.equal(generate(smollm.model, spec_of, "softmax", 3, 12, [5, 6], **mask(inputs)).tokens, found.tokens)


@pytest.mark.slow
def test_a_bare_processor_is_immune_to_what_comes_after_it(smollm):
    ids = smollm.tokenizer("When", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        q = decoder("softmax").distribution(smollm.model(ids).logits[0, -1].float())
    rows, drawn = 1000, []
    for part in range(5):
        processor = DecoderProcessor("softmax", seeds=range(part * rows, (part + 1) * rows))
        found = smollm.model.generate(
            ids, do_sample=True, top_k=2, top_p=0.5, temperature=0.3, max_new_tokens=1, num_return_sequences=rows,
            logits_processor=LogitsProcessorList([processor]),
        )  # fmt: skip
        drawn.append(found[:, -1])
    assert chi_square(torch.cat(drawn), q) > 1e-4


def test_greedy_is_transformers_greedy(smollm):
    for prompt in PROMPTS:
        inputs = smollm.encode([prompt])
        theirs = smollm.model.generate(**inputs, do_sample=False, max_new_tokens=64)[:, inputs["input_ids"].shape[1] :]
        ours = generate(smollm.model, inputs["input_ids"], "greedy", max_new_tokens=64, **mask(inputs))
        assert torch.equal(ours.tokens, theirs)


def test_bok_without_reward_is_softmax_at_the_matched_temperature(smollm):
    matched = 1 / (1 / 0.9 + (1 - 0.9**5) / 0.1)
    assert matched == pytest.approx(0.192, abs=5e-4)
    inputs = smollm.encode(PROMPTS[:3])
    texts = [
        generate(smollm.model, inputs["input_ids"], spec, 2, 32, [1, 2, 3], **mask(inputs)).tokens
        for spec in ("bok:beta=0,temperature=0.9", f"softmax:temperature={matched!r}")
    ]
    assert torch.equal(*texts)


def test_a_text_does_not_depend_on_its_neighbours(smollm):
    together = smollm.encode(PROMPTS)
    all_ = generate(smollm.model, together["input_ids"], "top-p", 2, 16, [7, 8, 9, 10, 11], **mask(together))
    for i in (0, 4):
        alone = smollm.encode([PROMPTS[i]])
        one = generate(smollm.model, alone["input_ids"], "top-p", 3, 16, [7 + i], **mask(alone))
        for sample in range(2):
            n = int(one.lengths[sample])
            assert one.tokens[sample, :n].tolist() == all_.tokens[2 * i + sample, :n].tolist()


def test_no_penalty_is_for_padding(smollm):
    prompts = ["Hi.", "Tell me at length about the old town and its river, its bridges and its people."]
    inputs = smollm.encode(prompts, raw=True)
    pad = int(inputs["input_ids"][0, 0])
    assert not inputs["attention_mask"][0, 0]
    seen = []

    class Looking(type(decoder("softmax"))):
        def mode(self, scores, context=None, validate=True):
            seen.append(context.tokens)
            return super().mode(scores, context, validate)

    looking = Looking(presence=0.5)
    generate(
        smollm.model, inputs["input_ids"], looking, attention_mask=inputs["attention_mask"], mode=True, max_new_tokens=2
    )
    assert [tokens.shape[1] for tokens in seen] == [inputs["input_ids"].shape[1], inputs["input_ids"].shape[1] + 1]
    assert (seen[-1][0, : int((inputs["attention_mask"][0] == 0).sum())] == -1).all()
    assert not (seen[0][0] == pad).any()
    assert torch.equal(seen[0][1], inputs["input_ids"][1])


def test_the_same_logits_and_seed_give_the_same_token_anywhere():
    scores = 3 * torch.randn(6, 500, generator=torch.Generator().manual_seed(0))
    seeds = [3, 1, 4, 1, 5, 9]
    ids = torch.zeros(6, 4, dtype=torch.int64)
    order = torch.tensor([5, 3, 0, 1, 4, 2])
    straight = DecoderProcessor("bok", seeds)(ids, scores).argmax(-1)
    shuffled = DecoderProcessor("bok", [seeds[i] for i in order])(ids, scores[order]).argmax(-1)
    assert torch.equal(straight[order], shuffled)


def test_log_q_and_log_p(smollm):
    inputs = smollm.encode(PROMPTS[:2])
    spec = "bok:temperature=0.8"
    found = generate(smollm.model, inputs["input_ids"], spec, 2, 20, [1, 2], trace=True, **mask(inputs))
    plain = generate(smollm.model, inputs["input_ids"], spec, 2, 20, [1, 2], **mask(inputs))
    assert torch.equal(found.tokens, plain.tokens)
    assert found.log_q is not None
    assert found.log_p is not None
    whole = torch.cat([inputs["input_ids"].repeat_interleave(2, 0), found.tokens], -1)
    length = found.tokens.shape[1]
    attention = torch.cat([inputs["attention_mask"].repeat_interleave(2, 0), torch.ones_like(found.tokens)], -1)
    with torch.inference_mode():
        logits = smollm.model(whole, attention_mask=attention).logits[:, -length - 1 : -1].float()
    q = decoder(spec).distribution(logits)
    chosen = found.tokens.unsqueeze(-1)
    close = {"atol": 5e-3, "rtol": 0.0}
    torch.testing.assert_close(
        found.log_p[found.written], logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)[found.written], **close
    )
    # q is five times as sharp as p, and so is the rounding of a cached forward pass
    own = q.gather(-1, chosen).squeeze(-1)
    torch.testing.assert_close(found.log_q.exp()[found.written], own[found.written], **close)
    assert found.effective_temperature is not None
    tau = found.effective_temperature[found.written]
    assert tau[tau > 0].min() > 0.15
    assert tau.max() < 0.25
    assert effective_temperature(logits[0, 0], found.entropy[0, 0]).item() == pytest.approx(tau[0].item(), rel=1e-2)
    after = ~found.written
    assert found.log_q[after].abs().sum() == 0


def test_custom_generate_directly(smollm):
    inputs = smollm.encode(PROMPTS[:2])
    sampling = Sampling("top-k:k=5", seeds=[1, 2])
    found = smollm.model.generate(
        **inputs, custom_generate=sampling, do_sample=True, num_return_sequences=2, max_new_tokens=8
    )
    again = generate(smollm.model, inputs["input_ids"], "top-k:k=5", 2, 8, [1, 2], **mask(inputs))
    assert torch.equal(found[:, inputs["input_ids"].shape[1] :], again.tokens)
    with pytest.raises(ValueError, match="num_beams=1"):
        smollm.model.generate(**inputs, custom_generate=Sampling("softmax"), num_beams=2, max_new_tokens=2)


def test_length_rules_and_users_processors_stay(smollm):
    ids = smollm.tokenizer("Hi", return_tensors="pt")["input_ids"]
    end = smollm.tokenizer.eos_token_id

    class OnlyTheEnd(MinNewTokensLengthLogitsProcessor):
        """A user's own: forbids everything but the end token and token 100."""

        def __init__(self):
            pass

        def __call__(self, input_ids, scores):
            kept = torch.full_like(scores, -torch.inf)
            kept[:, [100, end]] = scores[:, [100, end]].clamp_max(0.0)
            return kept

    processors = LogitsProcessorList([OnlyTheEnd()])
    found = generate(smollm.model, ids, "softmax", 40, 6, [3], logits_processor=processors, min_new_tokens=3)
    assert set(found.tokens.unique().tolist()) <= {100, end}
    assert found.lengths.min() >= 4
    assert found.finished.any()


def test_stop_strings_and_streams(smollm):
    inputs = smollm.encode(["Count from one to ten."])
    out, steps = io.StringIO(), []
    stream = Stream(smollm.tokenizer, out, lambda: steps.append(1))
    found = generate(smollm.model, inputs["input_ids"], "greedy", 1, 24, streamer=stream, **mask(inputs))
    assert out.getvalue().rstrip("\n") == smollm.text(found.tokens[0])
    assert len(steps) == found.tokens.shape[1]
    word = smollm.text(found.tokens[0]).split()[2]
    cut = generate(
        smollm.model, inputs["input_ids"], "greedy", 1, 24, stop=[word], tokenizer=smollm.tokenizer, **mask(inputs)
    )
    assert word in smollm.text(cut.tokens[0])
    assert cut.tokens.shape[1] < found.tokens.shape[1]


def test_what_cannot_be_done_is_refused(smollm):
    ids = torch.zeros(1, 8190, dtype=torch.int64)
    with pytest.raises(ValueError, match="reads 8192 at most"):
        generate(smollm.model, ids, max_new_tokens=3)
    with pytest.raises(ValueError, match="at least 1"):
        generate(smollm.model, ids[:, :3], n=0)
    with pytest.raises(ValueError, match="one entry per row"):
        generate(smollm.model, ids[:, :3], seeds=[1, 2], max_new_tokens=1)
    with pytest.raises(ValueError, match="generator or seeds"):
        DecoderProcessor("softmax", seeds=[1], generator=torch.Generator())


def test_derived_seeds_differ_and_do_not_depend_on_how_many():
    seeds = torch.tensor([1, 2, 3])
    many = derive_seeds(seeds, 50).view(3, 50)
    assert len(many.unique()) == 150
    assert torch.equal(many[:, :7], derive_seeds(seeds, 7).view(3, 7))


def test_defaults_of_transformers_are_no_wishes(smollm):
    assert distorting(smollm.model.generation_config) == {}
    assert math.isfinite(smollm.context)


def mask(inputs):
    return {"attention_mask": inputs["attention_mask"]}


def test_lengths_follow_whatever_ended_a_text(smollm):
    ids = smollm.tokenizer("When", return_tensors="pt")["input_ids"]
    plain = generate(smollm.model, ids, "softmax", 6, 12, [1])
    end = int(plain.tokens[0, 5])
    found = generate(smollm.model, ids, "softmax", 6, 12, [1], trace=True, eos_token_id=[2, end])
    for i, row in enumerate(found.tokens.tolist()):
        first = next((j for j, token in enumerate(row) if token in (2, end)), None)
        assert (int(found.lengths[i]), bool(found.finished[i])) == ((12, False) if first is None else (first + 1, True))
    assert found.finished[0]
    assert found.log_q is not None
    assert found.log_q[~found.written].abs().sum() == 0
    word = smollm.tokenizer.decode(plain.tokens[0, 3:5])
    cut = generate(smollm.model, ids, "softmax", 2, 12, [1], stop=[word], tokenizer=smollm.tokenizer)
    assert cut.finished[0]
    assert cut.lengths[0] < 12
    assert cut.tokens[0, : cut.lengths[0]].tolist() == plain.tokens[0, : cut.lengths[0]].tolist()


def test_processors_of_transformers_given_by_the_caller_are_kept_or_named(smollm):
    ids = smollm.tokenizer("When", return_tensors="pt")["input_ids"]
    usual = int(generate(smollm.model, ids, "greedy", max_new_tokens=1).tokens[0, 0])
    forbid = LogitsProcessorList([SuppressTokensLogitsProcessor([usual], device="cpu")])
    assert int(generate(smollm.model, ids, "greedy", max_new_tokens=1, logits_processor=forbid).tokens[0, 0]) != usual
    with pytest.warns(UserWarning, match="SuppressTokensLogitsProcessor"):
        smollm.model.generate(ids, custom_generate=Sampling("greedy"), max_new_tokens=1, logits_processor=forbid)


def test_a_processor_starts_anew_with_every_text():
    scores = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    used = DecoderProcessor("softmax", seeds=[5])
    for length in (3, 4, 5):
        used(torch.zeros(1, length, dtype=torch.int64), scores)
    again = used(torch.zeros(1, 9, dtype=torch.int64), scores)
    fresh = DecoderProcessor("softmax", seeds=[5])(torch.zeros(1, 3, dtype=torch.int64), scores)
    assert torch.equal(again, fresh)


def test_the_roomy_cache_is_the_usual_one(smollm):
    model = smollm.model
    inputs = smollm.encode(["The moon is", "Once upon a time there was"], raw=True)
    found = generate(model, inputs["input_ids"], "greedy", max_new_tokens=40, attention_mask=inputs["attention_mask"])
    usual = model.generate(**inputs, do_sample=False, max_new_tokens=40)
    assert torch.equal(found.tokens, usual[:, inputs["input_ids"].shape[1] :])
    cache = roomy_cache(model.config)
    with torch.inference_mode():
        for ids in inputs["input_ids"][:1].split(1, dim=1):
            model(ids, past_key_values=cache)
        other = model(inputs["input_ids"][:1]).past_key_values
    for layer, expected in zip(cache.layers, other.layers, strict=True):
        torch.testing.assert_close(layer.keys, expected.keys, atol=1e-4, rtol=1e-4)
    cache.batch_repeat_interleave(2)  # no longer in its buffer
    with torch.inference_mode():
        model(inputs["input_ids"][:1, :1].repeat(2, 1), past_key_values=cache)
    assert cache.layers[0].keys.shape[:3] == (2, expected.keys.shape[1], inputs["input_ids"].shape[1] + 1)
