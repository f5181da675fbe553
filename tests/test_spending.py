"""Best-of, votes and power sampling over a group of samples: against enumeration, and on a real model's texts."""

import itertools
import math
from collections import defaultdict
from functools import partial

import pytest
import torch
from scipy import stats

from goodness import chi_square
from simplexity import Codes
from simplexity.engines.transformers import Generated, generate
from simplexity.evaluation.scores import majority_at_k
from simplexity.spending import (
    Cost,
    Sample,
    ahead,
    best_of,
    length,
    log_p,
    log_p_per_token,
    majority,
    power,
    rerank,
    samples,
    vote,
)

INF = float("inf")


def said(*texts):
    return [Sample(text, (1,)) for text in texts]


def its_text(sample):
    return sample.text if sample.text != "-" else None


GROUP = [
    Sample("b", (1, 2, 3, 4), log_p=-4.0),
    Sample("a", (5, 6), log_p=-3.0),
    Sample("c", (7,), log_p=-3.0, finished=False),
]


# choosing


def test_the_best_first_and_equal_ones_in_their_order():
    ranking = rerank(GROUP, log_p)
    assert [s.text for s in ranking.samples] == ["a", "c", "b"]
    assert ranking.scores == (-3.0, -3.0, -4.0)
    assert ranking.cost == Cost(samples=3, tokens=7, calls=3)
    best = best_of(GROUP, log_p)
    assert (best.sample, best.score, best.cost) == (GROUP[1], -3.0, ranking.cost)


def test_scorers_are_added_as_numbers_are():
    assert best_of(GROUP, log_p_per_token).sample.text == "b"
    assert best_of(GROUP, lambda s: log_p(s) + 0.4 * length(s)).score == -3.0 + 0.8
    assert best_of(GROUP, lambda s: log_p(s) + 0.6 * length(s)).sample.text == "b"
    assert best_of(GROUP, lambda s: (0.0 if s.finished else -INF) - length(s)).sample.text == "a"
    assert best_of(GROUP, lambda s: torch.tensor(length(s))).score == 4.0


@pytest.mark.parametrize("value", [math.nan, None, "good"])
def test_a_score_that_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match=r"the scorer gave .* for sample 2"):
        best_of(GROUP, lambda s: value if s.text == "c" else 1.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: best_of([], length),
        lambda: rerank([], length),
        lambda: majority([], its_text),
        lambda: power([], 2.0),
    ],
)
def test_an_empty_group_is_refused(call):
    with pytest.raises(ValueError, match="the group is empty"):
        call()


def test_log_p_that_was_not_recorded_is_refused():
    with pytest.raises(ValueError, match="trace=True"):
        best_of(said("a"), log_p)


# samples of the transformers engine


def written(log=None):
    tokens = torch.tensor([[5, 6, 2], [5, 2, 0], [7, 8, 9], [2, 0, 0]])
    ends, done = torch.tensor([3, 2, 3, 1]), torch.tensor([True, True, False, True])
    return Generated(tokens, ends, done, 0.0, {}, log_q=log, log_p=None if log is None else 2 * log)


class Spelling:
    """A tokenizer that spells ids out, and 2 as nothing."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return " ".join(str(i) for i in ids if i != 2)


def test_groups_hold_what_was_written_and_nothing_after_the_end():
    log = -torch.tensor([[0.5, 0.25, 0.125], [1, 2, 0], [0.25, 0.25, 0.25], [4, 0, 0]])
    one, other = samples(Spelling(), written(log), n=2)
    assert one == (Sample("5 6", (5, 6, 2), -0.875, -1.75), Sample("5", (5, 2), -3.0, -6.0))
    assert other == (Sample("7 8 9", (7, 8, 9), -0.75, -1.5, finished=False), Sample("", (2,), -4.0, -8.0))
    assert samples(Spelling(), written(log)) == [(*one, *other)]


@pytest.mark.parametrize("log", [None, torch.zeros(4, 2)])
def test_without_a_trace_of_every_token_there_is_no_sum(log):
    assert {(s.log_q, s.log_p) for s in samples(Spelling(), written(log))[0]} == {(None, None)}


@pytest.mark.parametrize("n", [0, 3])
def test_texts_that_are_no_groups_are_refused(n):
    with pytest.raises(ValueError, match=f"4 texts are not groups of n = {n}"):
        samples(Spelling(), written(), n)


@pytest.mark.xdist_group("model")
def test_samples_of_a_real_model(smollm):
    inputs = smollm.encode(["Name a colour.", "Is the sea salty? Answer yes or no."])
    made = partial(generate, smollm.model, inputs["input_ids"], "top-p:p=0.9", n=3, seeds=[1, 2], max_new_tokens=8)
    found = made(trace=True, attention_mask=inputs["attention_mask"])
    groups = samples(smollm, found, n=3)
    assert [len(group) for group in groups] == [3, 3]
    for i, sample in enumerate(itertools.chain(*groups)):
        prompt = inputs["input_ids"][i // 3][inputs["attention_mask"][i // 3] == 1]
        whole = torch.cat([prompt, torch.tensor(sample.tokens)])
        with torch.inference_mode():
            logs = smollm.model(whole[None]).logits[0].double().log_softmax(-1)
        own = logs[len(prompt) - 1 : -1].gather(-1, whole[len(prompt) :, None]).sum().item()
        assert sample.log_p == pytest.approx(own, abs=1e-3)
        assert sample.log_p <= sample.log_q <= 0  # top-p only drops others
        assert sample.text == smollm.text(found.tokens[i][: found.lengths[i]])
        assert sample.finished == (sample.tokens[-1] in smollm.ends)
    assert best_of(groups[0], log_p).score == max(s.log_p for s in groups[0])
    assert sum(power(groups[1], 2.0, seed=1).weights) == pytest.approx(1.0)


# votes


def test_the_majority_and_what_none_is_worth():
    found = majority(said("-", "x", "y", "y", "-", "-"), its_text)
    assert (found.answer, found.winners, found.share, found.votes) == ("y", ("y",), 2 / 6, {"x": 1, "y": 2})
    assert (found.n, found.saved, found.cost) == (6, 0.0, Cost(6, 6, 6))
    group = said("x", "y", "z", "y", "x")
    tied = majority(group, its_text)
    assert (tied.answer, tied.winners, tied.share) == ("x", ("x", "y"), 0.4)
    assert tied.sample is group[0]
    nobody = majority(said("-", "-"), its_text)
    assert (nobody.answer, nobody.winners, nobody.share, nobody.votes) == (None, (None,), 1.0, {})


def test_the_same_majority_as_in_the_evaluation():
    g = torch.Generator().manual_seed(0)
    for _ in range(300):
        n = int(torch.randint(1, 9, (1,), generator=g))
        texts = ["xyz-"[i] for i in torch.randint(0, 4, (n,), generator=g)]
        right = torch.tensor([[text in "x" for text in texts]])
        winners = majority(said(*texts), its_text).winners
        expected = majority_at_k([[its_text(s) for s in said(*texts)]], right, n).item()
        assert sum(w == "x" for w in winners) / len(winners) == pytest.approx(expected)


def voted(texts, **options):
    """The vote over texts that come in this order."""
    source = iter(said(*texts))
    found = vote(lambda count: list(itertools.islice(source, count)), its_text, len(texts), **options)
    assert len(list(source)) == len(texts) - found.cost.samples
    return found


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_stopping_changes_no_vote_and_comes_as_soon_as_it_may(n):
    stops, outcomes = {}, defaultdict(set)
    for texts in itertools.product("xyz-", repeat=n):
        whole = majority(said(*texts), its_text)
        for at_once in (1, 2, 4):
            found = voted(texts, at_once=at_once)
            assert (found.answer, found.winners) == (whole.answer, whole.winners)
            assert found.cost.calls == math.ceil(found.cost.samples / at_once)
        stops[texts] = voted(texts).cost.samples
        for t in range(n + 1):
            outcomes[texts[:t]].add(whole.winners)
    for texts, stop in stops.items():  # one sample earlier it was still open
        assert len(outcomes[texts[: stop - 1]]) > 1
    assert n < 3 or min(stops.values()) < n


def test_how_likely_the_leader_leads():
    for first, second in itertools.product((0, 1, 2, 7, 40, 400), repeat=2):
        expected = stats.beta.sf(0.5, first + 1, second + 1)
        assert ahead(first, second) == pytest.approx(expected, rel=1e-9, abs=1e-15)
        assert ahead(first, second) + ahead(second, first) == pytest.approx(1.0)


def test_stopping_with_confidence():
    # after 4 of 4: 1 − 2⁻⁵ = 0.96875
    agreed = voted("xxxx" + "y" * 36, confidence=0.95)
    assert (agreed.answer, agreed.cost, agreed.saved) == ("x", Cost(4, 4, 4), 0.9)
    assert voted("xxxx" + "y" * 36).answer == "y"
    assert voted("xxxxx" + "y" * 35, confidence=0.97).cost.samples == 5
    assert voted("-" * 5, confidence=0.9).cost.samples == 5  # nobody leads
    texts = "xyyx" * 10
    assert voted(texts, confidence=0.999).cost.samples == 40
    for texts in itertools.product("xy-", repeat=6):  # never later than without
        assert voted(texts, confidence=0.9).cost.samples <= voted(texts).cost.samples


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"n": 0}, "at least 1, got 0 and 1"),
        ({"n": 3, "at_once": 0}, "at least 1, got 3 and 0"),
        ({"n": 3, "confidence": 0.5}, "between 0.5 and 1, got 0.5"),
        ({"n": 3, "confidence": 1.0}, "between 0.5 and 1, got 1.0"),
        ({"n": 3, "confidence": math.nan}, "between 0.5 and 1, got nan"),
        ({"n": 3, "at_once": 2}, r"draw\(2\) gave 1 samples"),
    ],
)
def test_votes_that_cannot_be_held_are_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        vote(lambda count: said("x"), its_text, **options)


def test_negative_votes_are_refused():
    with pytest.raises(ValueError, match="negative"):
        ahead(2, -1)


# power sampling, on texts of up to 4 tokens over {0, 1, end}, cut at 4

ALPHA, LONGEST, END = 2.0, 4, 2
P = torch.tensor([[0.5, 0.3, 0.2], [0.15, 0.6, 0.25], [0.0, 0.0, 1.0]]).double()  # after the end nothing else comes
Q = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.55, 0.35], [0.0, 0.0, 1.0]]).double()


def places(texts):
    """Texts `[..., 4]`, filled up with the end token, as numbers."""
    return texts @ torch.tensor([27, 9, 3, 1])


def chain(law):
    """The probability of every text by its number, `[81]`."""
    found = torch.zeros(81).double()
    for text in itertools.product(range(3), repeat=LONGEST):
        steps = zip((0, *text), text, strict=False)
        found[places(torch.tensor(text))] = math.prod(law[before, token].item() for before, token in steps)
    return found


def bonus(sample):
    return 0.5 * sample.tokens.count(1)


@pytest.fixture(scope="module")
def tree():
    """Every text as a sample, by its number; its probability under q; the law p^α·e^term."""
    p, q = chain(P), chain(Q)
    texts = {}
    for text in itertools.product(range(3), repeat=LONGEST):
        i = int(places(torch.tensor(text)))
        end = text.index(END) + 1 if END in text else LONGEST
        if q[i] > 0:
            texts[i] = Sample(str(i), text[:end], q[i].log().item(), p[i].log().item(), finished=END in text)
    target = torch.zeros(81).double()
    for i, sample in texts.items():
        target[i] = math.exp(ALPHA * sample.log_p + bonus(sample))
    assert len(texts) == 31
    return texts, q, target / target.sum()


def drawn(q, groups, size, coupled=False):
    """Numbers of texts drawn from q, `[groups, size]`."""
    if not coupled:
        g = torch.Generator().manual_seed(size)
        return torch.multinomial(q, groups * size, replacement=True, generator=g).view(groups, size)
    codes, last, found = Codes.spread(torch.arange(groups), size), torch.zeros(groups * size, dtype=torch.int64), []
    for _ in range(LONGEST):
        last = codes.draw(Q[last])
        found.append(last)
    return places(torch.stack(found, -1)).view(groups, size)


def resampled(tree, groups, size, coupled=False):
    """(what was chosen `[groups]`, the mean weight of every text `[81]`)."""
    texts, q, _ = tree
    table = drawn(q, groups, size, coupled)
    found = [power([texts[i] for i in row], ALPHA, bonus, seed=seed) for seed, row in enumerate(table.tolist())]
    weights = torch.tensor([one.weights for one in found]).double()
    law = torch.zeros(81).double().index_add_(0, table.flatten(), weights.flatten()) / groups
    return torch.tensor([int(one.samples[0].text) for one in found]), law


def distance(one, other):
    return 0.5 * (one - other).abs().sum().item()


@pytest.mark.parametrize("coupled", [False, True])
def test_with_many_samples_the_chosen_text_is_a_draw_from_the_power(tree, coupled):
    *_, target = tree
    chosen, law = resampled(tree, groups=3000, size=256, coupled=coupled)
    assert chi_square(chosen, target) > 1e-3
    assert distance(law, target) < 0.008


def test_the_bias_falls_as_one_over_the_samples(tree):
    _, q, target = tree
    groups = {4: 4000, 16: 2000, 64: 1500}
    bias = {size: distance(resampled(tree, count, size)[1], target) for size, count in groups.items()}
    assert distance(q, target) > 0.29  # one sample is all there is to choose from
    assert bias[4] > 2.5 * bias[16] > 2.5**2 * bias[64]
    chosen, _ = resampled(tree, 3000, 4)
    assert chi_square(chosen, target) < 1e-6  # so the test with 256 could have failed


def test_weights_by_hand():
    assert power([Sample("a", (1,), -3.0, -5.0)], 2.0).weights == (1.0,)
    group = [
        Sample("a", (1,), log_q=math.log(0.5), log_p=math.log(0.2)),
        Sample("b", (2,), log_q=math.log(0.25), log_p=math.log(0.4)),
        Sample("c", (3,), log_q=math.log(0.25), log_p=math.log(0.4)),
    ]
    raw = [0.04 / 0.5, 0.16 / 0.25 * 3, 0.0]
    term = {"a": 0.0, "b": math.log(3), "c": -INF}
    found = power(group, 2, lambda s: term[s.text], seed=3, draws=500)
    assert found.weights == pytest.approx([x / sum(raw) for x in raw])
    assert found.effective_size == pytest.approx(sum(raw) ** 2 / sum(x * x for x in raw))
    assert found.cost == Cost(samples=3, tokens=3, calls=3)
    assert power(group, 2, seed=1).cost.calls == 0
    assert found == power(group, 2, lambda s: term[s.text], seed=3, draws=500)
    assert stats.binomtest(sum(s.text == "a" for s in found.samples), 500, found.weights[0]).pvalue > 1e-3
    assert {s.text for s in found.samples} == {"a", "b"}
    far = [Sample(s.text, s.tokens, -1e4, s.log_p - 1e4) for s in group]  # long texts: no weight overflows
    assert power(far, 1, seed=0).weights == pytest.approx([0.2, 0.4, 0.4])


@pytest.mark.parametrize(
    ("sample", "options", "complaint"),
    [
        (Sample("a", (1,), log_p=-1.0), {}, "sample 1 has no log_q"),
        (Sample("a", (1,), log_q=-1.0), {}, "sample 1 has no log_p"),
        (Sample("a", (1,), -INF, -1.0), {}, "sample 1 has log_q = -inf"),
        (Sample("a", (1,), -1.0, -INF), {}, "sample 1 has log_p = -inf"),
        (Sample("a", (1,), math.nan, -1.0), {}, "sample 1 has log_q = nan"),
        (Sample("a", (1,), -1.0, math.nan), {}, "sample 1 has log_p = nan"),
        (Sample("a", (1,), -1.0, -1.0), {"alpha": -1.0}, "alpha must be a finite number"),
        (Sample("a", (1,), -1.0, -1.0), {"alpha": INF}, "alpha must be a finite number"),
        (Sample("a", (1,), -1.0, -1.0), {"alpha": math.nan}, "alpha must be a finite number"),
        (Sample("a", (1,), -1.0, -1.0), {"draws": 0}, "draws must be at least 1"),
        (Sample("a", (1,), -1.0, -1.0), {"term": lambda s: math.nan}, "the term gave nan for sample 0"),
        (Sample("a", (1,), -1.0, -1.0), {"term": lambda s: INF}, "below infinity"),
        (Sample("a", (1,), -1.0, -1.0), {"term": lambda s: -INF}, "above −infinity"),
    ],
)
def test_what_has_no_weight_is_refused(sample, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        power([Sample("b", (2,), -1.0, -1.0), sample], **{"alpha": 2.0, **options})
