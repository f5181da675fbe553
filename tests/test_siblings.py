"""Samples that know their siblings: who shares a text, and the decoder that counts them."""

from dataclasses import dataclass

import pytest
import torch

from simplexity import Context, Decoder, NegEntropy, Problem, decoder
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


def test_a_temperature_for_each_state():
    s, d = rows(3), decoder("tree-bok:beta=0,alone=0.5,together=1.5")
    q = d.distribution(s, Context(siblings=torch.tensor([1, 2, 7])))
    torch.testing.assert_close(q, torch.softmax(s / torch.tensor([[0.5], [1.5], [1.5]]).double(), -1))
    torch.testing.assert_close(d.distribution(s), torch.softmax(s / 0.5, -1))
    plan = d._gpu_plan(s.float(), Context(siblings=torch.tensor([1, 2, 7])))  # what a GPU would be asked
    if plan is not None:  # without Triton there is none
        assert plan.kind == "softmax"
        assert plan.lam.flatten().tolist() == [0.5, 1.5, 1.5]


@pytest.mark.parametrize("siblings", [torch.tensor([1.0, 2.0]), torch.tensor([1, 2, 3])])
def test_siblings_that_do_not_fit_are_refused(siblings):
    with pytest.raises(ValueError, match=r"context\.siblings must be whole numbers \[2\]"):
        decoder("tree-bok").distribution(torch.zeros(2, 5), Context(siblings=siblings))


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
