"""Samples that know their siblings: who shares a text, and the decoder that counts them."""

from dataclasses import dataclass

import pytest
import torch
from scipy import stats

from simplexity import Codes, Context, Decoder, NegEntropy, Problem, decoder
from simplexity.siblings import Siblings


def shared(texts, size):
    """By comparison of whole texts `[rows, T]`."""
    groups = texts.view(-1, size, texts.shape[1]).tolist()
    return [group.count(text) for group in groups for text in group]


def test_who_shares_a_text():
    tokens = torch.randint(0, 2, (40, 6), generator=torch.Generator().manual_seed(0))
    siblings = Siblings(40, 8)
    assert siblings.count.tolist() == [8] * 40
    for step in range(6):
        siblings.follow(tokens[:, step])
        assert siblings.count.tolist() == shared(tokens[:, : step + 1], 8)
    assert len(set(siblings.count.tolist())) > 1
    with pytest.raises(ValueError, match="6 rows are not groups of 4"):
        Siblings(6, 4)


def rows(count=6, size=300):
    s = 3 * torch.randn(count, size, generator=torch.Generator().manual_seed(2)).double()
    s[:, -5:] = -torch.inf
    return s


SIBLINGS = torch.tensor([1, 2, 3, 5, 8, 64])


@pytest.mark.parametrize(
    "spec",
    ["tree-bok", "tree-bok:beta=9,alone=0.6,together=1.4", "tree-bok:weights=top-m,m=3,beta=4", "tree-bok:beta=0"],
)
def test_the_optimum_for_every_number_of_siblings(spec):
    s, d = rows(), decoder(spec)
    context = Context(siblings=SIBLINGS)
    q = d.distribution(s, context)
    assert bool(d.certify(s, context).holds(1e-9).all())
    for i, k in enumerate(SIBLINGS.tolist()):
        alone = d.distribution(s[i], Context(siblings=torch.tensor(k)))
        torch.testing.assert_close(q[i], alone, atol=1e-12, rtol=1e-9)
    free, status = d.distribution(s.float(), context, validate=False)
    assert (status == 0).all()
    torch.testing.assert_close(free, q.float(), atol=2e-6, rtol=1e-4)


def test_it_is_best_of_k_with_the_reward_divided_by_k():
    s = rows()
    for i, k in enumerate(SIBLINGS.tolist()):
        own = decoder("tree-bok:beta=6,alone=0.7").distribution(s[i], Context(siblings=torch.tensor(k)))
        spec = f"bok:scores=none,solver=exact,temperature=0.7,lam=1,k={k},beta={6 / k!r}"
        torch.testing.assert_close(own, decoder(spec).distribution(s[i]), atol=1e-10, rtol=1e-7)


def test_alone_it_commits_and_together_it_spreads():
    s = torch.tensor([3.0, 2.5, 1.0, 0.0]).double()
    p = torch.softmax(s, -1)
    d = decoder("tree-bok:beta=5")
    alone = d.distribution(s)
    torch.testing.assert_close(alone, torch.softmax(s + 5 * p, -1))
    together = d.distribution(s, Context(siblings=torch.tensor(8)))
    assert alone[0] > p[0] > together[0]
    assert together[1:3].sum() > p[1:3].sum()


@pytest.mark.parametrize("beta", [400, 1000, 3000, 1e5])
@pytest.mark.parametrize("k", [2, 8])
def test_however_strong_the_reward(beta, k):
    s = 3 * torch.randn(6, 7, generator=torch.Generator().manual_seed(0)).double()
    for spec in (f"tree-bok:beta={beta}", f"bok:solver=exact,scores=none,lam=1,k={k},beta={beta / k}"):
        gap = decoder(spec).certify(s, Context(siblings=torch.full((6,), k))).gap
        assert bool((gap < 1e-9 * beta).all())


def test_a_temperature_for_each_state():
    s, d = rows(3), decoder("tree-bok:beta=0,alone=0.5,together=1.5")
    q = d.distribution(s, Context(siblings=torch.tensor([1, 2, 7])))
    torch.testing.assert_close(q, torch.softmax(s / torch.tensor([[0.5], [1.5], [1.5]]).double(), -1))
    torch.testing.assert_close(d.distribution(s), torch.softmax(s / 0.5, -1))
    plan = d._gpu_plan(s.float(), Context(siblings=torch.tensor([1, 2, 7])))  # what a GPU would be asked
    if plan is not None:  # without Triton there is none
        assert plan.kind == "softmax"
        assert plan.lam.flatten().tolist() == [0.5, 1.5, 1.5]


def test_a_lone_sample_that_is_sure():
    # at K = 1 the slope's exponent K − 2 is below 0, and 1 − q is 0
    mask = torch.arange(5) == 1
    context = Context(siblings=torch.tensor([1, 2]), mask=mask.expand(2, 5))
    tokens, status = decoder("tree-bok").sample(torch.randn(2, 5), seeds=[1, 2], context=context, validate=False)
    assert tokens.tolist() == [1, 1]
    assert status.tolist() == [0, 0]
    for top in (20.0, 60.0, 500.0):
        s, alone = torch.tensor([[top, 0.0, 1.0]]).double(), Context(siblings=torch.tensor([1]))
        for spec in ("tree-bok", "tree-bok:alone=0.3,beta=9"):
            q, status = decoder(spec).distribution(s, alone, validate=False)
            assert status.item() == 0
            torch.testing.assert_close(q, decoder(spec).distribution(s, alone), atol=1e-12, rtol=0)


def test_what_is_not_found_is_not_drawn_from():
    from simplexity.problem import Status

    @dataclass(frozen=True)
    class Lost(Decoder):
        name = "lost"

        def problem(self, scores, context=None):
            return Problem(scores, NegEntropy(), lam=torch.full_like(scores[..., :1], torch.nan))

    tokens, status = Lost().sample(torch.randn(2, 5), seeds=[1, 2], validate=False)
    assert tokens.tolist() == [-1, -1]
    assert all(value in (Status.UNSOLVED, Status.PARAMETER) for value in status.tolist())


def test_numbers_keep_their_digits():
    s, context = rows(1)[0], Context(siblings=torch.tensor(3))
    whole = decoder("tree-bok:beta=5,alone=0.7").distribution(s, context)
    torch.testing.assert_close(
        decoder("tree-bok:beta=5,alone=0.7,together=0.7").distribution(s, context), whole, atol=1e-14, rtol=0
    )
    same = decoder(f"bok:solver=exact,scores=none,lam=1,temperature=0.7,k=3,beta={5 / 3!r}").distribution(s)
    torch.testing.assert_close(same, whole, atol=1e-12, rtol=0)


def test_coupled_siblings_draw_from_their_q():
    """Two steps, groups of two: q of the second depends on whether the two stayed together."""
    groups, d = 20_000, decoder("tree-bok:beta=0,alone=1,together=0.25")
    first, second = torch.tensor([0.6, 0.4]).log(), torch.tensor([0.2, 0.6, 0.2]).log()
    codes, siblings = Codes.spread(torch.arange(groups), 2), Siblings(2 * groups, 2)
    before = []
    for step, scores in enumerate((first, second)):
        before.append(siblings.count)
        codes.respread(siblings)
        tokens = d.sample(scores.expand(2 * groups, -1), codes=codes, context=Context(siblings=siblings.count))
        for k in (1, 2) if step else (2,):
            q = d.distribution(scores.double(), Context(siblings=torch.tensor(k)))
            for index in (0, 1):
                own = tokens.view(-1, 2)[:, index][before[step].view(-1, 2)[:, index] == k]
                seen = torch.bincount(own, minlength=len(q)).double()
                assert stats.chisquare(seen, q / q.sum() * len(own)).pvalue > 1e-4, (step, k, index)
        if step == 0:
            apart = (tokens.view(-1, 2)[:, 0] != tokens.view(-1, 2)[:, 1]).double().mean().item()
        siblings.follow(tokens)
    q = d.distribution(first.double(), Context(siblings=torch.tensor(2)))
    assert apart == pytest.approx(2 * q.min().item(), abs=0.01)  # evenly spread; independent ones: 2·q₀·q₁


@pytest.mark.parametrize("siblings", [torch.tensor([1.0, 2.0]), torch.tensor([1, 2, 3])])
def test_siblings_that_do_not_fit_are_refused(siblings):
    with pytest.raises(ValueError, match=r"context\.siblings must be whole numbers \[2\]"):
        decoder("tree-bok").distribution(torch.zeros(2, 5), Context(siblings=siblings))


def test_a_row_has_at_least_itself():
    with pytest.raises(ValueError, match="must be at least 1"):
        decoder("tree-bok").distribution(torch.zeros(2, 5), Context(siblings=torch.tensor([0, 1])))


@dataclass(frozen=True)
class Recorder(Decoder):
    """softmax that writes down how many siblings it was told of."""

    name, uses, told = "recorder", ("siblings",), []

    def problem(self, scores, context=None):
        self.told.append(context.siblings.tolist())
        return Problem(scores, NegEntropy(), lam=2.0)


@pytest.mark.xdist_group("model")
def test_transformers_tells_the_decoder_of_its_siblings(smollm):
    from simplexity.engines.transformers import generate

    inputs = smollm.encode(["Name a colour.", "Tell me about the sea, at length."])
    given = {"attention_mask": inputs["attention_mask"], "max_new_tokens": 5}
    for coupled in (False, True):
        Recorder.told.clear()
        found = generate(smollm.model, inputs["input_ids"], Recorder(), 6, seeds=[1, 2], coupled=coupled, **given)
        assert len(Recorder.told) == 5
        for step, told in enumerate(Recorder.told):
            assert told == shared(found.tokens[:, :step], 6) if step else told == [6] * 12
        assert Recorder.told[-1] != [6] * 12
    found = generate(smollm.model, inputs["input_ids"], "tree-bok:beta=20", 6, seeds=[1, 2], coupled=True, **given)
    assert found.tokens.shape == (12, 5)
