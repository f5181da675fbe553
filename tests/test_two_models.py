"""Decoders that look at two models, or at one under two prompts, and at rewards; with both caches in transformers."""

import json

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from simplexity import Context, Status, decoder
from simplexity.draw import derive_seeds
from simplexity.engines.other_model import OtherModel, Reading
from simplexity.engines.transformers import DecoderProcessor, Sampling, generate
from simplexity.masks.token_sets import TokenSets
from test_cli import run  # noqa: F401

pytestmark = pytest.mark.xdist_group("model")

INF = float("inf")
PROMPTS = ["Write one sentence about the sea.", "Name a colour."]
OTHERS = ["Hi.", "Write one sentence about a long train journey through the mountains in winter."]


@pytest.fixture
def rows():
    g = torch.Generator().manual_seed(3)
    s, t = (3 * torch.randn(4, 60, generator=g).double() for _ in range(2))
    s[1, ::3] = -INF
    return s, t


def test_guidance_is_the_papers_formula(rows):
    s, t = rows
    log_c, log_u = s.log_softmax(-1), t.log_softmax(-1)
    for scale, tau in ((1.5, 1.0), (0.3, 0.7), (4.0, 2.0)):
        guided = log_u + scale * (log_c - log_u)
        q = decoder(f"guidance:scale={scale},temperature={tau}").distribution(s, Context(other=t))
        torch.testing.assert_close(q, (guided / tau).softmax(-1), atol=1e-12, rtol=0)
    torch.testing.assert_close(decoder("guidance:scale=1").distribution(s, Context(other=t)), s.softmax(-1))
    only = t.masked_fill(s == -INF, -INF)
    torch.testing.assert_close(decoder("guidance:scale=0").distribution(s, Context(other=t)), only.softmax(-1))


def test_contrastive_is_the_papers_formulas(rows):
    s, t = rows
    log_e, log_a = s.log_softmax(-1), t.log_softmax(-1)
    plausible = log_e.exp() >= 0.05 * log_e.exp().amax(-1, keepdim=True)
    assert (plausible.sum(-1) > 2).all()
    li = (log_e - log_a).masked_fill(~plausible, -INF)
    q = decoder("contrastive:alpha=0.05,temperature=0.8").distribution(s, Context(other=t))
    torch.testing.assert_close(q, (li / 0.8).softmax(-1), atol=1e-12, rtol=0)
    amateur = (t / 0.5).log_softmax(-1)  # the amateur's temperature of Li et al.
    q = decoder("contrastive:alpha=0.05,amateur=2").distribution(s, Context(other=t))
    torch.testing.assert_close(q, (log_e - amateur).masked_fill(~plausible, -INF).softmax(-1), atol=1e-12, rtol=0)
    beta = 0.5
    obrien = ((1 + beta) * s - beta * t).masked_fill(~plausible, -INF)
    q = decoder("contrastive:alpha=0.05,expert=1.5,amateur=0.5").distribution(s, Context(other=t))
    torch.testing.assert_close(q, obrien.softmax(-1), atol=1e-12, rtol=0)


def test_controlled_tilts_the_model_by_the_reward(rows):
    s, r = rows
    q = decoder("controlled:lam=0.5,temperature=2").distribution(s, Context(rewards=r))
    torch.testing.assert_close(q, ((s / 2).log_softmax(-1) + r / 0.5).softmax(-1), atol=1e-12, rtol=0)
    shared = decoder("controlled").distribution(s, Context(rewards=r[0]))  # one reward for all rows
    torch.testing.assert_close(shared, (s + r[0]).softmax(-1), atol=1e-12, rtol=0)
    best = decoder("controlled:lam=0").distribution(s, Context(rewards=r))
    assert torch.equal(best.argmax(-1), r.masked_fill(s == -INF, -INF).argmax(-1))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("guidance", {"scale": [0.0, 1.0, 1.5, 3.0], "temperature": [0.5, 1.0, 2.0, 1.0]}),
        ("contrastive", {"alpha": [0.01, 0.1, 0.5, 1], "expert": [1, 0, 1.5, 2], "amateur": [0, 1, 0.5, 1.0]}),
        ("controlled", {"lam": [0.0, 0.1, 1.0, 9.0], "temperature": [0.5, 1.0, 2.0, 1.0]}),
    ],
)  # fmt: skip
def test_parameters_per_row_and_certificates(rows, name, values):
    s, t = rows
    together = decoder({"decoder": name, **values})
    q = together.distribution(s, Context(other=t, rewards=t))
    for i in range(4):
        alone = decoder({"decoder": name, **{key: column[i] for key, column in values.items()}})
        torch.testing.assert_close(
            alone.distribution(s[i], Context(other=t[i], rewards=t[i])), q[i], atol=1e-12, rtol=0
        )
    assert (together.certify(s, Context(other=t, rewards=t)).gap < 1e-9).all()


def test_what_is_missing_or_does_not_fit_is_said(rows):
    s, t = rows
    for name in ("guidance", "contrastive"):
        for call in (decoder(name).distribution, decoder(name).sample, decoder(name).problem):
            with pytest.raises(ValueError, match=f"{name} needs another model's logits"):
                call(s)
        with pytest.raises(ValueError, match=r"context.other must be \[4, 60\], got \[4, 59\]"):
            decoder(name).distribution(s, Context(other=t[:, 1:]))
    with pytest.raises(ValueError, match="controlled needs a reward for every token"):
        decoder("controlled").distribution(s, Context(other=t))
    with pytest.raises(ValueError, match="beside another model's logits or rewards"):
        decoder("controlled:entropy=1").distribution(s, Context(rewards=t))
    # −inf for the other model alone: its contrast has no bound, and that is no number to climb
    t[2, 5] = -INF
    with pytest.raises(ValueError, match=r"row 2: a \+inf"):
        decoder("guidance:scale=2").distribution(s, Context(other=t))
    _, status = decoder("guidance:scale=2").distribution(s, Context(other=t), validate=False)
    assert status.tolist() == [0, 0, Status.INFINITE, 0]
    forbidden = decoder("guidance:scale=0.5").distribution(s, Context(other=t))
    assert forbidden[2, 5] == 0
    for one in (1.0, [1.0] * 4):  # a weight of zero is no part of the sum, whatever it weighs
        alone = decoder({"decoder": "guidance", "scale": one})
        torch.testing.assert_close(alone.distribution(s, Context(other=t)), s.softmax(-1))
    t[2, 5] = float("nan")
    with pytest.raises(ValueError, match="row 2: a NaN"):
        decoder("contrastive:alpha=1e-9").distribution(s, Context(other=t))


def full_logits(model, ids):
    """The logits after `ids`, from a forward pass over all of them: no cache, no padding."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0, -1].float()


def plain_loop(first, spec, prompt, second, other_prompt, seed, steps, ends):
    """One text, token by token, both models reading everything anew at each step."""
    d, text = decoder(spec), []
    for step in range(steps):
        scores, other = full_logits(first, prompt + text), full_logits(second, other_prompt + text)
        text.append(int(d.sample(scores[None], seeds=[seed], step=step, context=Context(other=other[None]))))
        if text[-1] in ends:
            break
    return text


def unpadded(inputs):
    return [ids[mask.bool()].tolist() for ids, mask in zip(*inputs.values(), strict=True)]


@pytest.mark.parametrize(
    "spec", ["guidance:scale=1.5,temperature=0.9", "contrastive:alpha=0.05,expert=1.5,amateur=0.5"]
)
def test_two_prompts_and_two_caches_write_what_a_loop_without_caches_writes(smollm, spec):
    inputs, others = smollm.encode(PROMPTS), smollm.encode(OTHERS)
    other = OtherModel(smollm.model, others["input_ids"], others["attention_mask"])
    options = {"attention_mask": inputs["attention_mask"], "other": other}
    free = generate(smollm.model, inputs["input_ids"], spec, 2, 7, [5, 6], **options)
    # one row is made to end early, so that the others go on beside its padding
    ends = [2, int(free.tokens[1, 3])]
    found = generate(smollm.model, inputs["input_ids"], spec, 2, 7, [5, 6], eos_token_id=ends, **options)
    assert found.finished[1]
    assert found.lengths[1] <= 4
    assert found.lengths.max() > 4
    seeds = derive_seeds(torch.tensor([5, 6]), 2).tolist()
    prompts, negatives = unpadded(inputs), unpadded(others)
    for row in range(4):
        expected = plain_loop(
            smollm.model, spec, prompts[row // 2], smollm.model, negatives[row // 2], seeds[row], 7, ends
        )
        assert found.tokens[row, : found.lengths[row]].tolist() == expected
    alone = generate(smollm.model, inputs["input_ids"], "softmax:temperature=0.9", 2, 7, [5, 6],
                     attention_mask=inputs["attention_mask"])  # fmt: skip
    assert not torch.equal(alone.tokens[:, :4], free.tokens[:, :4])  # the other prompt matters


def test_guidance_is_that_of_transformers(smollm):
    inputs, negative = smollm.encode(PROMPTS[:1]), smollm.encode(OTHERS[:1])
    ids = inputs["input_ids"]
    theirs = smollm.model.generate(
        **inputs, do_sample=False, max_new_tokens=8, guidance_scale=1.7,
        negative_prompt_ids=negative["input_ids"], negative_prompt_attention_mask=negative["attention_mask"],
    )  # fmt: skip
    other = OtherModel(smollm.model, **negative)
    ours = generate(smollm.model, ids, "guidance:scale=1.7", max_new_tokens=8, mode=True, other=other)
    assert torch.equal(ours.tokens, theirs[:, ids.shape[1] :])
    processor = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.7, smollm.model, negative["input_ids"])
    reading, d = Reading(other, 1), decoder("guidance:scale=1.7")
    with torch.inference_mode():
        for length in range(ids.shape[1], theirs.shape[1]):
            scores = smollm.model(theirs[:, :length]).logits[:, -1].float()
            expected = processor(theirs[:, :length], scores)
            context = Context(other=reading.after(theirs[:, ids.shape[1] : length]))
            own = d.problem(scores, context).scores
            torch.testing.assert_close(own.log_softmax(-1), expected.log_softmax(-1), atol=2e-3, rtol=0)


def tiny(seed, size=200):
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                         bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=1.0)  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_two_models_side_by_side_each_read_a_token_once():
    first, second = tiny(0), tiny(1)
    ids = torch.tensor([[0, 5, 6, 7], [8, 9, 10, 11]])
    mask = (ids > 0).long()
    other = OtherModel(second, torch.tensor([[20, 21]]))  # one prompt for all
    shapes = []
    note = lambda _, args, rest: shapes.append(tuple(rest["input_ids"].shape))  # noqa: E731
    watched = second.register_forward_pre_hook(note, with_kwargs=True)
    sampling = Sampling("contrastive:alpha=0.01", seeds=[3, 4], other=other)
    found = first.generate(ids, attention_mask=mask, custom_generate=sampling, do_sample=True, num_return_sequences=2,
                           max_new_tokens=9, eos_token_id=None)  # fmt: skip
    watched.remove()
    assert shapes == [(4, 2)] + [(4, 1)] * 8
    seeds = derive_seeds(torch.tensor([3, 4]), 2).tolist()
    for row in range(4):
        prompt = ids[row // 2][mask[row // 2].bool()].tolist()
        expected = plain_loop(first, "contrastive:alpha=0.01", prompt, second, [20, 21], seeds[row], 9, [])
        assert found[row, 4:].tolist() == expected


def test_left_padding_has_no_place_of_its_own():
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=200, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=1.0,
                        bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
    first, second = tiny(0), GPT2LMHeadModel(config).eval()  # the second one's places are absolute
    ids, theirs = torch.tensor([[5, 6], [8, 9]]), torch.tensor([[0, 0, 0, 20], [21, 22, 23, 24]])
    other = OtherModel(second, theirs, (theirs > 0).long())
    found = generate(first, ids, "guidance", 1, 7, [3, 4], other=other, eos_token_id=None)
    seeds = derive_seeds(torch.tensor([3, 4]), 1).tolist()
    for row, prompt in enumerate(([20], [21, 22, 23, 24])):
        expected = plain_loop(first, "guidance", ids[row].tolist(), second, prompt, seeds[row], 7, [])
        assert found.tokens[row].tolist() == expected


def test_models_with_more_or_fewer_tokens():
    ids = torch.tensor([[5, 6, 7]])
    spec = "guidance:scale=0.5,temperature=50"  # flat: every token that may be drawn is
    fewer = generate(tiny(0), ids, spec, 300, 2, [1], other=OtherModel(tiny(1, 150), ids), eos_token_id=None)
    assert fewer.tokens.max() == 149
    some = [TokenSets(lambda row, written: range(140, 160))]
    both = generate(tiny(0), ids, spec, 99, 2, [1], other=OtherModel(tiny(1, 150), ids), eos_token_id=None, masks=some)
    assert set(both.tokens.unique().tolist()) == set(range(140, 150))
    more = generate(tiny(0, 150), ids, spec, 300, 2, [1], other=OtherModel(tiny(1), ids), eos_token_id=None)
    assert more.tokens.max() == 149


def test_other_models_that_do_not_fit_are_refused():
    model, ids = tiny(0), torch.ones(4, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="2 prompts for 4: give it one, or one for each"):
        generate(model, ids, "guidance", 2, 2, other=OtherModel(model, ids[:2]))
    with pytest.raises(ValueError, match="the other model's prompt has 60 tokens"):
        generate(model, ids, "guidance", 1, 8, other=OtherModel(model, ids[:1].repeat(1, 20)))
    with pytest.raises(ValueError, match=r"input_ids must be \[prompts, length\]"):
        OtherModel(model, ids[0])
    with pytest.raises(ValueError, match=r"attention_mask must be \[4, 3\]"):
        OtherModel(model, ids, ids[:2])
    with pytest.raises(ValueError, match="guidance needs another model's logits"):
        generate(model, ids, "guidance", 1, 2)


def test_rewards_as_numbers_and_as_a_function():
    model, ids = tiny(0), torch.tensor([[5, 6, 7], [8, 9, 10]])
    fond = torch.zeros(200)
    fond[50:60] = 30.0
    liked = generate(model, ids, "controlled", 3, 5, [1, 2], rewards=fond, eos_token_id=None)
    assert ((liked.tokens >= 50) & (liked.tokens < 60)).all()
    calls = []

    def climb(tokens, step):
        calls.append((tuple(tokens.shape), step))
        return 100.0 * torch.nn.functional.one_hot((tokens[:, -1] + 1) % 200, 200)

    found = generate(model, ids, "controlled", 1, 4, [1, 2], rewards=climb, eos_token_id=None, trace=True)
    assert found.tokens.tolist() == [[8, 9, 10, 11], [11, 12, 13, 14]]
    assert calls == [((2, 3 + step), step) for step in range(4)]
    with pytest.raises(ValueError, match="controlled needs a reward"):
        generate(model, ids, "controlled", 1, 2)


def test_a_processor_reads_each_text_from_its_start():
    model, ids = tiny(0), torch.tensor([[5, 6, 7]])
    processor = DecoderProcessor("guidance", seeds=[1], other=OtherModel(model, ids))
    scores = torch.randn(1, 200)
    first = processor(ids, scores)
    for _ in range(2):
        ids = torch.cat([ids, ids[:, :1]], -1)
        processor(ids, scores)
    assert torch.equal(processor(torch.tensor([[9]]), scores), first)


def test_the_command_line(run, smollm):  # noqa: F811
    arguments = ("generate", PROMPTS[0], "--decoder", "guidance:scale=2", "--seed", "3", "--max-tokens", "6", "--json")
    code, out, _ = run(*arguments, "--other-prompt", OTHERS[0])
    inputs = smollm.encode(PROMPTS[:1])
    other = OtherModel(smollm.model, **smollm.encode(OTHERS[:1]))
    found = generate(smollm.model, inputs["input_ids"], "guidance:scale=2", 1, 6, [3], other=other)
    assert code == 0
    assert json.loads(out)["samples"][0]["tokens"] == found.tokens[0, : found.lengths[0]].tolist()
    code, empty, _ = run(*arguments, "--other-prompt", "")
    assert code == 0
    assert empty != out
    for extra, says in (
        ((), "give --other-prompt or --other-model"),
        (("--decoder", "controlled"), "used from Python"),
        (("--decoder", "softmax", "--other-prompt", "x"), "softmax looks at one model alone"),
    ):
        code, _, err = run(*arguments, *extra)
        assert code == 2
        assert says in err


def test_explain_and_compare_leave_out_what_needs_more(run):  # noqa: F811
    specs = ("--decoder", "softmax:entropy=1", "--decoder", "guidance", "--decoder", "controlled")
    code, out, err = run("explain", "Hello", *specs)
    assert code == 0
    assert "guidance is left out: guidance needs another model's logits" in err
    assert "controlled is left out" in err
    assert "guidance" not in out
    code, out, err = run("explain", "Hello", *specs, "--other-prompt", "Goodbye")
    assert code == 0
    assert "guidance" in out
    assert "guidance is" not in err
    code, out, err = run("compare", "Hello", *specs, "-n", "1", "--max-tokens", "2", "--other-prompt", "Goodbye")
    assert code == 0
    assert "guidance" in out
    assert "controlled is left out" in err
    code, _, err = run("compare", "Hello", "--decoder", "guidance")
    assert code == 2
    assert "give --other-prompt" in err
