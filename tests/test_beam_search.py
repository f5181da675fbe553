"""Beam search finds the optimum of its stated objective on small trees, and transformers' own text on a real model."""

import itertools
import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from simplexity.engines.transformers import generate
from simplexity.spending import REGULARISERS, Cost, Regulariser, beam, beam_search

INF = float("inf")
END, SIZE, LONGEST = 3, 4, 4
ALL = SIZE**LONGEST  # more beams than there are beginnings


class Tree:
    """Random log-probabilities after every beginning, some tokens impossible; checks what it is asked like a cache."""

    def __init__(self, seed):
        g = torch.Generator().manual_seed(seed)
        self.after, self.rows = {}, []
        for t in range(LONGEST):
            for text in itertools.product(range(SIZE), repeat=t):
                scores = torch.randn(SIZE, generator=g).double()
                scores[torch.rand(SIZE, generator=g) < 0.15] = -INF
                self.after[text] = scores.log_softmax(-1) if scores.amax() > -INF else scores

    def step(self, tokens, parents):
        texts = [tuple(row) for row in tokens.tolist()]
        if tokens.shape[1]:
            assert [text[:-1] for text in texts] == [self.rows[i] for i in parents.tolist()]
        self.rows = texts
        return torch.stack([self.after[text] for text in texts])

    def texts(self):
        """Every text that ends or is cut, with the surprisals of its tokens and of the likeliest in their places."""
        found = {}
        for t in range(1, LONGEST + 1):
            for text in itertools.product(range(SIZE), repeat=t):
                if END in text[:-1] or (t < LONGEST and text[-1] != END):
                    continue
                logs = [self.after[text[:i]] for i in range(t)]
                u = [-log[token].item() for log, token in zip(logs, text, strict=True)]
                if math.inf not in u:
                    found[text] = u, [-log.amax().item() for log in logs]
        return found

    def greedy(self):
        text = ()
        while len(text) < LONGEST and END not in text:
            text = (*text, self.after[text].argmax().item())
        return text


def variance(u, least):
    mean = sum(u) / len(u)
    return sum((x - mean) ** 2 for x in u) / len(u)


PLAIN = {
    "greedy": lambda u, least: sum((x - y) ** 2 for x, y in zip(u, least, strict=True)),
    "variance": variance,
    "max": lambda u, least: max(u),
    "squared": lambda u, least: sum(x * x for x in u),
    "local": lambda u, least: sum((x - y) ** 2 for x, y in itertools.pairwise(u)),
}


def value(u, least, lam=0.0, regulariser=None, length=0.0):
    penalty = lam * PLAIN[regulariser](u, least) if lam else 0.0
    return -sum(u) - penalty + length * len(u)


def test_every_regulariser_has_a_plain_formula_here():
    assert PLAIN.keys() == REGULARISERS.keys()


OBJECTIVES = [
    {"length": length, **extra}
    for length in (-0.5, 0.0, 0.7, 1.5)
    for extra in ({}, *({"lam": lam, "regulariser": name} for lam in (0.3, 3.0) for name in PLAIN))
]


def test_with_room_for_all_beginnings_the_optimum_is_found():
    trees = [(tree, tree.texts()) for tree in map(Tree, range(12))]
    chosen = defaultdict(list)
    for (tree, texts), objective in itertools.product(trees, OBJECTIVES):
        values = {text: value(u, least, **objective) for text, (u, least) in texts.items()}
        best = max(values, key=values.__getitem__)
        found = beam_search(tree.step, ALL, LONGEST, [END], **objective)
        assert found.tokens == best, objective
        assert found.score == pytest.approx(values[best], abs=1e-12)
        assert found.log_p == pytest.approx(-sum(texts[best][0]), abs=1e-12)
        assert found.finished == (best[-1] == END)
        chosen[objective.get("lam"), objective.get("regulariser")].append(best)
    strong = [chosen[3.0, name] for name in PLAIN]
    assert all(one != other for one, other in itertools.combinations([chosen[None, None], *strong], 2))


def test_with_a_term_of_whole_texts_too():
    for seed in range(4):
        tree = Tree(seed)

        def term(text):
            return -INF if text[0] == 1 else 3.0 * (text[-1] == 2) - 0.5 * sum(text)

        objective = {"lam": 0.5, "regulariser": "max", "length": 0.2}
        values = {text: value(u, least, **objective) + term(text) for text, (u, least) in tree.texts().items()}
        best = max(values, key=values.__getitem__)
        found = beam_search(tree.step, ALL, LONGEST, [END], term=term, **objective)
        assert found.tokens == best
        assert found.score == pytest.approx(values[best], abs=1e-12)


def test_the_greedy_regulariser_ends_in_the_greedy_text():
    for seed in range(10):
        tree = Tree(seed)
        for beams in (1, 2, 5, ALL):
            assert beam_search(tree.step, beams, LONGEST, [END], 1e9, "greedy").tokens == tree.greedy()
        assert beam_search(tree.step, 1, LONGEST, [END]).tokens == tree.greedy()


@pytest.mark.parametrize("beams", [1, 3, ALL])
def test_stopping_early_loses_nothing(beams):
    fewer = dict.fromkeys(("", *PLAIN), 0)
    for tree, objective in itertools.product([Tree(seed) for seed in range(5)], OBJECTIVES):
        stopped = beam_search(tree.step, beams, LONGEST, [END], **objective)
        through = beam_search(tree.step, beams, LONGEST, [END], term=lambda text: 0.0, **objective)
        assert (stopped.tokens, stopped.score) == (through.tokens, through.score)
        fewer[objective.get("regulariser", "")] += through.cost.calls - stopped.cost.calls
    assert all(fewer.values()), fewer


def test_a_regulariser_that_grows_stops_the_search_earlier():
    # what has been paid is not paid back: (1, 2) is likelier than (0, end), but not worth going on with
    tree = {(): {0: 0.6, 1: 0.3}, (0,): {3: 0.22}, (1,): {2: 0.95}}

    def step(tokens, parents):
        found = torch.full((len(tokens), 40), 0.01)
        for row, text in zip(found, tokens.tolist(), strict=True):
            for token, p in tree.get(tuple(text), {}).items():
                row[token] = p
        return found.log()

    by_name = beam_search(step, 2, 3, [3], 3.0, "greedy")
    waiting = beam_search(step, 2, 3, [3], 3.0, replace(REGULARISERS["greedy"], grows=False))
    assert by_name.tokens == waiting.tokens == (0, 3)
    assert (by_name.cost.calls, waiting.cost.calls) == (2, 3)


def test_a_variance_that_falls_again_is_waited_for():
    # surprisals 0, 1, ½: after two tokens the text is below the one set aside, after three it is above
    tree = [torch.full((200,), -9.0).double() for _ in range(3)]
    tree[0][[0, 1]] = torch.tensor([0.976, 0.0235]).double().log()
    tree[1][2], tree[2][1] = -1.0, -0.5
    found = beam_search(lambda tokens, _: tree[tokens.shape[1]].expand(len(tokens), -1), 2, 3, [1], 12.0, "variance")
    assert found.tokens == (0, 2, 1)
    at_once = math.log(0.0235)  # the end alone: no variance
    after_two = sum(u := [math.log(0.976), -1.0]) - 12 * variance(u, None)
    assert after_two < at_once < found.score


def test_a_text_that_has_ended_takes_no_place_and_a_poor_end_is_not_set_aside():
    tree = {
        (): [0.0, 0.55, 0.35, 0.10],
        (1,): [0.25, 0.25, 0.25, 0.25],
        (2,): [0.0, 0.0, 0.02, 0.98],
        (2, 2): [0.0, 0.0, 0.0, 1.0],
    }

    def step(tokens, parents):
        return torch.tensor([tree.get(tuple(row), [0.25] * 4) for row in tokens.tolist()]).log()

    assert beam_search(step, 1, 3, [END]).tokens == (1, 0, 0)  # the end was never the best of a step
    found = beam_search(step, 2, 3, [END])
    assert found.tokens == (2, END)
    assert found.log_p == pytest.approx(math.log(0.35 * 0.98))
    assert found.finished
    assert found.cost == Cost(samples=0, tokens=3, calls=2)  # nothing left had more than 0.14
    longer = beam_search(step, 2, 3, [END], length=3.0)
    assert longer.tokens == (1, 0, 0)  # 3 tokens are worth more, and the search waited for them
    assert longer.cost.calls == 3
    first = beam_search(lambda *_: torch.tensor([[0.4, 0.0, 0.0, 0.6]]).log(), 2, 3, [END])
    assert (first.tokens, first.cost.calls) == ((END,), 1)


@pytest.mark.parametrize("name", REGULARISERS)
def test_a_dead_end_is_left(name):
    tree = {(): [0.6, 0.4, 0.0], (0,): [0.0, 0.0, 0.0], (1,): [0.0, 0.0, 1.0]}

    def step(tokens, parents):
        return torch.tensor([tree[tuple(row)] for row in tokens.tolist()]).log()

    assert beam_search(step, 2, 2, [2], 1.0, name).tokens == (1, 2)


def test_equal_scores_go_to_the_lower_ids():
    flat = torch.full((1, 300), 1 / 300).log()
    for beams in (1, 7):
        assert beam_search(lambda tokens, _: flat.expand(len(tokens), -1), beams, 3, []).tokens == (0, 0, 0)


def test_a_regulariser_of_ones_own():
    tree = Tree(3)
    odd = Regulariser(lambda past, u: (u * 0 + torch.tensor([0.0, 5.0, 0.0, 0.0])).nan_to_num(0.0), grows=False)
    found = beam_search(tree.step, ALL, LONGEST, [END], 1.0, odd)
    values = {text: -sum(u) - 5.0 * (text[-1] == 1) for text, (u, _) in tree.texts().items()}
    assert found.tokens == max(values, key=values.__getitem__)


def rows(values):
    return lambda tokens, parents: torch.tensor(values).expand(len(tokens), -1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"beams": 0}, "beams and max_new_tokens must be at least 1, got 0 and 2"),
        ({"max_new_tokens": 0}, "must be at least 1, got 1 and 0"),
        ({"lam": -1.0}, "lam must be a finite number"),
        ({"lam": INF}, "lam must be a finite number"),
        ({"lam": 1.0}, "lam = 1.0 needs a regulariser"),
        ({"length": math.nan}, "length must be a finite number"),
        ({"lam": 1.0, "regulariser": "gready"}, "unknown regulariser 'gready': there are greedy, variance"),
        ({"ends": [2]}, "the end token 2 is none of the 2 tokens"),
        ({"ends": [-1]}, "the end token -1 is none of the 2 tokens"),
        ({"step": rows([1.0, 2.0])}, "none of them NaN or above 0"),
        ({"step": rows([-1.0, math.nan])}, "none of them NaN or above 0"),
        ({"step": rows([-INF, -INF])}, "no text was found"),
        ({"step": lambda tokens, parents: torch.zeros(3, 2)}, r"log-probabilities \[1, V\], got \[3, 2\]"),
        ({"term": lambda text: math.nan}, "the term gave nan"),
        ({"term": lambda text: INF}, "the term gave inf"),
        ({"term": lambda text: -INF}, "no text was found"),
        ({"lam": 1.0, "regulariser": Regulariser(lambda past, u: -u)}, "NaN or less than 0"),
        ({"lam": 1.0, "regulariser": Regulariser(lambda past, u: u * math.nan)}, "NaN or less than 0"),
    ],
)
def test_what_cannot_be_searched_is_refused(options, complaint):
    usual = {"step": rows([-0.5, -1.0]), "beams": 1, "max_new_tokens": 2, "ends": [1]}
    with pytest.raises(ValueError, match=complaint):
        beam_search(**{**usual, **options})


# inside transformers


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, initializer_range=0.6, eos_token_id=7, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("name", [None, *REGULARISERS])
def test_the_cache_follows_the_beams(tiny, name):
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    objective = {} if name is None else {"lam": 0.5, "regulariser": name}

    @torch.inference_mode()
    def step(tokens, parents):  # everything read anew
        whole = torch.cat([prompt.expand(len(tokens), -1), tokens], -1)
        return tiny(whole, use_cache=False).logits[:, -1].log_softmax(-1)

    moved = []
    for length in (0.0, 1.5):
        found = beam(tiny, prompt, beams=5, max_new_tokens=12, length=length, **objective)
        plain = beam_search(step, 5, 12, [7], length=length, **objective)
        assert found.tokens == plain.tokens
        assert found.score == pytest.approx(plain.score, abs=1e-4)
        assert found.cost == Cost(0, plain.cost.tokens + prompt.shape[1] - 1, plain.cost.calls)
        moved.append(found.cost.calls)
    assert max(moved) > 3


@pytest.mark.parametrize(
    ("ids", "options", "complaint"),
    [
        (torch.ones(2, 3, dtype=torch.int64), {}, r"one prompt, input_ids \[1, length\], got \[2, 3\]"),
        (torch.ones(3, dtype=torch.int64), {}, r"got \[3\]"),
        (torch.ones(1, 60, dtype=torch.int64), {"max_new_tokens": 5}, "60 tokens and 5 are to be written.* 64 at most"),
        (torch.ones(1, 3, dtype=torch.int64), {"max_new_tokens": 5, "ends": [40]}, "end token 40"),
    ],
)
def test_what_the_model_cannot_search_is_refused(tiny, ids, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        beam(tiny, ids, **options)


@pytest.mark.xdist_group("model")
@pytest.mark.parametrize(
    ("prompt", "limit", "ended"), [("What is the capital of France?", 24, True), ("Write about the sea.", 16, False)]
)
def test_the_same_text_as_transformers(smollm, prompt, limit, ended):
    inputs = smollm.encode([prompt])
    ids = inputs["input_ids"]
    # early_stopping="never" and length_penalty=0: log p of the whole text, searched until nothing can beat the best
    theirs = smollm.model.generate(
        **inputs, num_beams=4, do_sample=False, length_penalty=0.0, early_stopping="never", max_new_tokens=limit
    )[0, ids.shape[1] :]
    found = beam(smollm.model, ids, beams=4, max_new_tokens=limit)
    assert list(found.tokens) == theirs.tolist()[: len(found.tokens)]
    assert found.finished == ended
    with torch.inference_mode():
        whole = torch.cat([ids[0], theirs[: len(found.tokens)]])
        logs = smollm.model(whole[None]).logits[0].double().log_softmax(-1)[ids.shape[1] - 1 : -1]
    own = logs.gather(-1, whole[ids.shape[1] :, None]).sum().item()
    assert found.log_p == found.score == pytest.approx(own, abs=1e-3)
    assert found.cost.tokens <= ids.shape[1] + 4 * (found.cost.calls - 1)
    greedy = generate(smollm.model, ids, "greedy", max_new_tokens=limit, trace=True)
    assert greedy.log_p is not None
    assert found.log_p > greedy.log_p.sum().item() - 1e-3
    as_greedy = beam(smollm.model, ids, beams=2, max_new_tokens=6, lam=1e9, regulariser="greedy")
    assert list(as_greedy.tokens) == greedy.tokens[0, : len(as_greedy.tokens)].tolist()


@pytest.mark.xdist_group("model")
def test_padding_is_not_read(smollm):
    both = smollm.encode(["2 + 2 =", "The quick brown fox jumps over the lazy dog and"], raw=True)
    padded = beam(smollm.model, both["input_ids"][:1], 3, 4, attention_mask=both["attention_mask"][:1])
    alone = beam(smollm.model, smollm.encode(["2 + 2 ="], raw=True)["input_ids"], 3, 4)
    assert padded.tokens == alone.tokens
    assert padded.log_p == pytest.approx(alone.log_p, abs=1e-3)
