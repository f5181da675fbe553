"""Thousands of rows at once: the same texts as transformers' own loop, whatever leaves the batch early."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("triton")

from simplexity import decoder
from simplexity.decoding import Decoder
from simplexity.engines.live_rows import Rows
from simplexity.engines.many_rows import LOOK, ManyRows, serves
from simplexity.engines.transformers import generate
from simplexity.models import load_model

GPU = torch.cuda.is_available()
SPECS = [
    pytest.param("softmax:temperature=0.5,repetition=1.05", False, marks=pytest.mark.slow),
    pytest.param("top-p:p=0.9,temperature=0.5", True, marks=pytest.mark.slow),
    pytest.param("tree-bok:beta=4,alone=0.3,together=0.8", True, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def small():
    found = load_model(None, "cpu")
    found.model.double()  # coupled draws magnify the rounding of earlier steps, which is another one here
    return found


@pytest.mark.parametrize(("spec", "coupled"), SPECS)
def test_texts_are_those_of_generate(monkeypatch, small, spec, coupled):
    asked = ["Name three colours.", "What is 2+2? One word.", "Say hello."]
    inputs, seeds, limit = small.encode(asked), torch.tensor([11, 12, 13]), 3 * LOOK
    expected = generate(
        small.model, inputs["input_ids"], spec, attention_mask=inputs["attention_mask"], n=4, max_new_tokens=limit,
        seeds=seeds, trace=4, coupled=coupled,
    )  # fmt: skip
    prompts = [row[own.bool()].tolist() for row, own in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    many = ManyRows(small.model, 13, max(map(len, prompts)) + limit)
    step = many._forward
    monkeypatch.setattr(many, "_forward", lambda size: step(size).float())  # as transformers rounds them
    for _ in range(2):  # what the first texts left behind does not matter
        with torch.inference_mode():
            found = many.generate(prompts, spec, 4, limit, seeds, small.ends, every=4, coupled=coupled)
        assert found.lengths.tolist() == expected.lengths.tolist()
        assert found.finished.tolist() == expected.finished.tolist()
        for own, theirs, length in zip(found.tokens, expected.tokens, found.lengths.tolist(), strict=True):
            assert own[:length].tolist() == theirs[:length].tolist()
        looked = expected.entropy.shape[1]
        torch.testing.assert_close(found.entropy[:, :looked], expected.entropy, atol=1e-3, rtol=1e-3)
        both = expected.effective_temperature.isfinite() & (expected.entropy > 1e-4)
        torch.testing.assert_close(
            found.effective_temperature[:, :looked][both], expected.effective_temperature[both], atol=1e-2, rtol=1e-2
        )
    assert small.model.config._attn_implementation == "sdpa", "others may read with a mask"
    assert found.finished.any(), "no text left early: the test shows nothing"
    assert many.clock.seconds() > 0


@pytest.mark.skipif(not GPU, reason="graphs are captured on a GPU")
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize(
    "spec", ["softmax", "top-p:p=0.9,temperature=0.8", "bok:lam=0.5", "top-k:repetition=1.2", "tree-bok:beta=4"]
)
def test_what_a_graph_repeats_is_what_it_was_captured_from(monkeypatch, spec, coupled):
    model, ends, limit, prompts = random_model().cuda(), list(range(10)), 20 * LOOK, some_prompts()
    many = ManyRows(model, 70, max(map(len, prompts)) + limit)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]).cuda()
    model.generation_config.eos_token_id = ends
    with torch.inference_mode():
        expected = generate(
            model, ids, spec, attention_mask=(ids > 0).long(), n=8, max_new_tokens=limit, seeds=torch.arange(8),
            coupled=coupled,
        )  # fmt: skip
        captured = many.generate(prompts, spec, 8, limit, torch.arange(8), ends, every=16, coupled=coupled)
        monkeypatch.setattr(Rows, "alike", lambda self: False)
        launched = many.generate(prompts, spec, 8, limit, torch.arange(8), ends, every=16, coupled=coupled)
    assert captured.lengths.tolist() == launched.lengths.tolist()
    assert torch.equal(captured.tokens, launched.tokens)
    torch.testing.assert_close(captured.entropy, launched.entropy)
    assert len(many.graphs) > 1, "no row left the batch: the test shows nothing"
    if coupled:  # codes magnify the rounding of the model, which sums in another order there
        return
    texts = [
        [row[:length].tolist() for row, length in zip(found.tokens, found.lengths.tolist(), strict=True)]
        for found in (captured, expected)
    ]
    # a draw whose number lies at the edge of two tokens may go the other way, for the same reason
    assert sum(own == theirs for own, theirs in zip(*texts, strict=True)) >= 60, "of 64"


@pytest.mark.parametrize(
    ("spec", "coupled"),
    [
        pytest.param("softmax", False, marks=pytest.mark.slow),
        pytest.param("tree-bok:alone=0.6,together=1.5", False, marks=pytest.mark.slow),
        pytest.param("top-p:p=0.9,temperature=0.8", True, marks=pytest.mark.slow),
        ("top-p:p=0.9,temperature=0.8", False),
        ("tree-bok:alone=0.6,together=1.5", True),
    ],
)
def test_turns_that_are_repeated_draw_what_others_do(monkeypatch, spec, coupled):
    """What a GPU does from graphs, step by step: places that nobody stands in, a step that is read from a tensor."""

    class Again:
        def __init__(self, run):
            self.replay = run

    def replay(many, live):
        size = min(-(-live // 8) * 8, many.room)
        scores = many._forward(size)
        return size, places.setdefault(size, scores.clone()).copy_(scores)

    model, ends, limit, prompts = random_model().double(), list(range(80)), 6 * LOOK, some_prompts()
    asked = (prompts, prompts[:5])
    many, places, seeds = ManyRows(model, 70, max(map(len, prompts)) + limit), {}, torch.arange(8)
    with torch.inference_mode():
        expected = [many.generate(p, spec, 3, limit, seeds[: len(p)], ends, 16, coupled) for p in asked]
        monkeypatch.setattr(Decoder, "has_kernel", lambda *_: True)
        monkeypatch.setattr(ManyRows, "_captured", lambda self, run: Again(run))
        monkeypatch.setattr(ManyRows, "step", replay)
        found = [many.generate(p, spec, 3, limit, seeds[: len(p)], ends, 16, coupled) for p in asked]
    for own, theirs in zip(found, expected, strict=True):
        assert own.lengths.tolist() == theirs.lengths.tolist()
        assert torch.equal(own.tokens, theirs.tokens)
        torch.testing.assert_close(own.entropy, theirs.entropy)
    assert len(places) > 1, "no row left the batch: the test shows nothing"


def test_groups_that_leave_do_not_change_who_is_counted_with_whom():
    rows = Rows.of([[1], [2], [3]], decoder("tree-bok"), 2, 4, torch.arange(3), [0], coupled=True, room=9)
    siblings = rows.siblings_of(6)
    assert siblings is not None
    siblings.follow(torch.tensor([5, 6, 7, 7, 8, 9]))
    rows.keep(4, torch.tensor([2, 3, 4, 5, 0, 1]))
    found = rows.siblings_of(rows.live)
    assert found is not None
    assert found.count.tolist() == [2, 2, 1, 1]
    assert rows.alive == 4
    assert rows.whole(9) == 8


def some_prompts() -> list[list[int]]:
    """Eight, of different lengths."""
    return [torch.arange(20 + i, 40 + 3 * i).tolist() for i in range(8)]


def random_model():
    """Small, with scores far from level."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=500, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.3, pad_token_id=0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def test_room_is_checked(small):
    many = ManyRows(small.model, 2, 20)
    with pytest.raises(ValueError, match="room for 2 texts of 20 tokens"):
        many.generate([[1, 2]], "softmax", 3, 10, torch.tensor([1]), [2], 4)
    with pytest.raises(ValueError, match="room for 2 texts of 20 tokens"):
        many.generate([[1, 2]], "softmax", 2, 19, torch.tensor([1]), [2], 4)


def test_which_models_are_known(small):
    assert serves(small.model)
    from transformers import AutoConfig

    class Other:
        config = AutoConfig.for_model("gpt2")

    assert not serves(Other())


def test_attention_reads_the_text_of_its_row():
    from simplexity.kernels.gpu_attention import attention

    g, device = torch.Generator().manual_seed(0), "cuda" if GPU else "cpu"
    query = torch.randn(3, 6, 32, generator=g)
    keys, values = torch.randn(2, 5, 2, 150, 32, generator=g)
    slots, lengths = torch.tensor([4, 0, 2]), torch.tensor([1, 64, 137])
    on_device = [x.to(device) for x in (query, keys, values, slots, lengths)]
    found = attention(*on_device, 0.2).cpu()
    for i, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        own = [x[slot, :, :length].repeat_interleave(3, 0).double() for x in (keys, values)]
        weights = torch.softmax((own[0] @ query[i].double().unsqueeze(-1)).squeeze(-1) * 0.2, -1)
        torch.testing.assert_close(found[i].double(), (weights.unsqueeze(1) @ own[1]).squeeze(1), atol=1e-5, rtol=1e-5)
