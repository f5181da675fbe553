"""Coupled draws: each sample of a group an exact draw of a whole text, the group spread over the tree of texts."""

import itertools

import pytest
import torch
from scipy import stats

from simplexity import Codes, Context, decoder, draw
from simplexity.draw import inverse_cdf, locate

GROUPS, SIZE = 20_000, 4
# the law of the next token given the last one
TREES = {
    "dyadic": [[0.5, 0.5], [0.5, 0.5]],
    "skewed": [[0.25, 0.75], [0.875, 0.125]],
    "thirds": [[0.3, 0.6, 0.1], [1 / 3, 1 / 3, 1 / 3], [0.05, 0.05, 0.9]],
}


def texts(law, length, groups=GROUPS, size=SIZE, seed=0):
    """Texts `[groups·size, length]`, the first token drawn as after token 0."""
    table = torch.tensor(law, dtype=torch.float32)
    codes = Codes.spread(torch.arange(groups) + seed, size)
    last, found = torch.zeros(groups * size, dtype=torch.int64), []
    for _ in range(length):
        last = codes.draw(table[last])
        found.append(last)
    return torch.stack(found, 1)


@pytest.mark.parametrize("name", TREES)
def test_every_sample_is_an_exact_draw_however_long_the_text(name):
    law = torch.tensor(TREES[name]).double()
    law /= law.sum(-1, keepdim=True)
    bits = -(law.log2() * law).nan_to_num().sum(-1).min()
    found = texts(TREES[name], int(200 / bits) + 12)[:, -4:]
    n = len(law)
    for index in range(SIZE):
        own = found[index::SIZE]
        before = torch.bincount(own[:, 0], minlength=n).double()
        for start in range(n):  # the last three tokens, given the one before them
            three = own[own[:, 0] == start][:, 1:]
            seen = torch.bincount(three @ torch.tensor([n * n, n, 1]), minlength=n**3).double()
            chance = torch.stack(
                [law[start, a] * law[a, b] * law[b, c] for a, b, c in itertools.product(range(n), repeat=3)]
            )
            assert stats.chisquare(seen, chance * before[start]).pvalue > 1e-4, (index, start)


def leaves(law, length):
    """Every text with its interval of codes, in order."""
    found = [((), 0.0, 1.0)]
    for _ in range(length):
        longer = []
        for text, low, width in found:
            for token, p in enumerate(law[text[-1] if text else 0]):
                longer.append(((*text, token), low, width * p))
                low += width * p
        found = longer
    return found


@pytest.mark.parametrize("name", TREES)
def test_a_group_holds_more_texts_than_independent_samples_would(name):
    length = 4
    found = texts(TREES[name], length).view(GROUPS, SIZE, length)
    distinct = torch.tensor([len({tuple(text) for text in group}) for group in found.tolist()]).double()
    widths = torch.tensor([width for _, _, width in leaves(TREES[name], length)]).double()
    independent = (1 - (1 - widths) ** SIZE).sum()
    ends = widths.cumsum(0).clamp_max(1.0)
    grid = (torch.arange(200_000).double() + 0.5) / 200_000
    spread = torch.stack([torch.searchsorted(ends, (grid + i / SIZE) % 1.0) for i in range(SIZE)], 1).sort(1).values
    expected = 1 + (spread[:, 1:] != spread[:, :-1]).double().sum(1).mean()
    assert expected > independent + 0.1
    assert distinct.mean().item() == pytest.approx(expected.item(), abs=4 * (distinct.std() / GROUPS**0.5).item())


def test_a_groups_texts_depend_on_its_seed_alone():
    law = TREES["thirds"]
    together = texts(law, 30, groups=9).view(9, SIZE, 30)
    for group in (0, 5):
        assert torch.equal(texts(law, 30, groups=1, seed=group), together[group])


def test_rows_that_end_early_change_no_other():
    law = torch.tensor(TREES["thirds"])
    whole = texts(TREES["thirds"], 30, groups=5)
    codes, last, found = Codes.spread(torch.arange(5), SIZE), torch.zeros(5 * SIZE, dtype=torch.int64), []
    ends = torch.arange(5 * SIZE) % 7 * 4  # each seventh row at once, others later
    for step in range(30):
        q = law[last]
        q[step >= ends] = torch.tensor([1.0, 0.0, 0.0])  # what is written after an end does not matter
        last = codes.draw(q)
        found.append(last)
    drawn = torch.stack(found, 1)
    for row, end in enumerate(ends.tolist()):
        assert torch.equal(drawn[row, :end], whole[row, :end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_a_number_lies(dtype):
    q = torch.rand(50, 3000, dtype=dtype)
    q[:, ::3] = 0
    u = torch.rand(50, dtype=torch.float64)
    token, rest, width = locate(q, u)
    assert torch.equal(token, inverse_cdf(q, u))
    p = q.double() / q.double().sum(-1, keepdim=True)
    torch.testing.assert_close(width, p.gather(-1, token[:, None])[:, 0], atol=1e-12, rtol=1e-6)
    before = (p.cumsum(-1) - p).gather(-1, token[:, None])[:, 0]
    torch.testing.assert_close(before + rest * width, u, atol=1e-9 if dtype == torch.float64 else 1e-6, rtol=0)
    assert ((rest >= 0) & (rest < 1)).all()


@pytest.mark.parametrize(
    "spec", ["softmax", "top-p:p=0.8", "sparsemax:lam=2", "bok:temperature=2", "bok:solver=exact", "xtc"]
)
def test_every_decoder_draws_by_codes(spec):
    scores = torch.randn(1500) * 2
    d, groups, size = decoder(spec), 600, 8
    codes = Codes.spread(torch.arange(groups), size)
    rows = scores.expand(groups * size, -1)
    context = Context(seeds=torch.zeros(len(rows), dtype=torch.int64))
    q = d.distribution(scores, Context(seeds=torch.tensor(0)))
    drawn = d.sample(rows, codes=codes, context=context)
    for index in (0, 5):
        seen = torch.bincount(drawn[index::size], minlength=1500).double()
        common = q * groups >= 5
        both = [torch.cat([x[common], x[~common].sum().view(1)]) for x in (seen, q.double() * groups)]
        kept = both[1] > 0.5
        assert (seen[q == 0] == 0).all()
        assert stats.chisquare(both[0][kept], both[1][kept] * both[0][kept].sum() / both[1][kept].sum()).pvalue > 1e-4


def test_one_sample_alone_begins_as_in_its_group():
    for size in (1, 3, 8):
        codes = Codes.spread(-5, size)
        alone = [Codes.at(-5, index, size) for index in range(size)]
        assert torch.equal(torch.cat([one.code for one in alone]), codes.code)
        assert torch.equal(torch.cat([one.seeds for one in alone]), codes.seeds)


def test_what_does_not_fit_is_refused():
    codes = Codes.spread([1, 2], 3)
    with pytest.raises(ValueError, match="6 codes need as many rows"):
        codes.draw(torch.full((4, 5), 0.2))
    with pytest.raises(ValueError, match="at least one sample"):
        Codes.spread(1, 0)
    with pytest.raises(ValueError, match="a generator or codes"):
        decoder("softmax").sample(torch.zeros(6, 5), torch.Generator(), codes=codes)


@pytest.mark.xdist_group("model")
def test_the_samples_of_a_prompt_are_coupled_in_transformers(smollm):
    from simplexity.engines.transformers import generate

    inputs = smollm.encode(["Name a colour.", "Tell me about the sea, at length."])
    given = {"attention_mask": inputs["attention_mask"], "max_new_tokens": 3}
    ids, model = inputs["input_ids"], smollm.model
    both = generate(model, ids, "softmax", 8, seeds=[1, 2], coupled=True, **given)
    again = generate(model, ids[1:], "softmax", 8, seeds=[2], coupled=True, attention_mask=inputs["attention_mask"][1:],
                     max_new_tokens=3)  # fmt: skip
    # later tokens stretch what the logits of another batch differ by in their last digits
    assert torch.equal(both.tokens[8:, 0], again.tokens[:, 0])
    with torch.inference_mode():
        logits = model(**{k: inputs[k] for k in ("input_ids", "attention_mask")}).logits[:, -1]
    codes = Codes.spread([1, 2], 8)
    first = codes.draw(decoder("softmax").distribution(logits).repeat_interleave(8, 0))
    assert torch.equal(both.tokens[:, 0], first)
    q = decoder("softmax").distribution(logits[:1]).expand(320, -1)
    coupled = Codes.spread(range(40), 8).draw(q)
    distinct = [
        sum(len(set(group)) for group in tokens.view(40, 8).tolist())
        for tokens in (coupled, draw(q, seeds=list(range(320))))
    ]
    assert distinct[0] > distinct[1] + 10
    with pytest.raises(ValueError, match="give no generator and not mode"):
        generate(model, ids, "softmax", 8, coupled=True, mode=True, **given)
