"""Batches whose rows have different decoders, as serving engines bring them."""

import logging
from dataclasses import dataclass, replace

import pytest
import torch
from scipy import stats

from conftest import surroundings
from simplexity import Codes, Context, Decoder, NegEntropy, Problem, Status, decoder, decoders
from simplexity.engines import rows_by_decoder
from simplexity.engines.request_codes import place_of, request_code
from simplexity.engines.rows_by_decoder import (
    FAILED,
    NO_DECODER,
    Tally,
    refuse_distorting,
    refuse_needy,
    refuse_siblings,
    reshape,
)

SPECS = ["softmax", "top-p:p=0.9", "sparsemax", "bok", "bok:solver=exact,k=16", "top-k:k=7", "entmax:alpha=1.3", "kl"]


@pytest.fixture(autouse=True)
def _nothing_told():
    rows_by_decoder._told.clear()


@dataclass(frozen=True)
class Broken(Decoder):
    """Raises as soon as it is asked."""

    name = "broken"

    def problem(self, scores, context=None):
        raise RuntimeError("it broke")


def scores(rows=6, size=300):
    return 3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("spec", SPECS)
def test_one_decoder_for_all_rows_gives_log_q(spec):
    s = scores()
    logits = s.clone()
    assert reshape(logits, [decoder(spec)] * 6).tolist() == [0] * 6
    q = decoder(spec).distribution(s)
    torch.testing.assert_close(logits.softmax(-1), q, atol=1e-6, rtol=1e-4)
    assert ((logits == -torch.inf) == (decoder(spec).log_distribution(s)[0] == -torch.inf)).all()
    torch.testing.assert_close(logits.logsumexp(-1), torch.zeros(6), atol=1e-5, rtol=0)


def test_every_registered_decoder_can_be_handed_over():
    s = scores()
    for name in decoders():
        logits = s.clone()
        context = surroundings(s) if decoder(name).needs else Context()
        context = replace(context, seeds=torch.arange(6))  # some throw a coin
        assert reshape(logits, [name] * 6, context).tolist() == [0] * 6
        torch.testing.assert_close(logits.softmax(-1), decoder(name).distribution(s, context), atol=1e-5, rtol=1e-4)


def test_each_row_gets_its_own_decoder():
    s = scores(7)
    mixed = ["bok", decoder("top-p"), None, "bok", '{"decoder": "top-k", "k": 3}', "sparsemax", decoder("top-p")]
    logits = s.clone()
    assert reshape(logits, mixed).tolist() == [0, 0, NO_DECODER, 0, 0, 0, 0]
    for row, spec in enumerate(["bok", "top-p", None, "bok", "top-k:k=3", "sparsemax", "top-p"]):
        alone = s[row] if spec is None else decoder(spec).distribution(s[row]).log()
        torch.testing.assert_close(logits[row], alone, atol=1e-4, rtol=1e-4)
    assert torch.equal(logits[2], s[2])


def test_equal_decoders_are_solved_together():
    calls = []

    class Counted(type(decoder("softmax"))):
        def log_distribution(self, scores, context=None, out=None):
            calls.append(len(scores))
            return super().log_distribution(scores, context, out)

    logits = scores()
    mine = [Counted(temperature=t) for t in (0.5, 2.0, 0.5, 0.5, 2.0, 0.5)]
    assert reshape(logits, mine).tolist() == [0] * 6
    assert sorted(calls) == [2, 4]


def test_rows_side_by_side_are_solved_where_they_are():
    seen = []

    class Looking(type(decoder("softmax"))):
        def log_distribution(self, scores, context=None, out=None):
            seen.append(scores.data_ptr())
            return super().log_distribution(scores, context, out)

    logits = scores()
    reshape(logits, [None, None, *[Looking()] * 4])
    assert seen == [logits[2].data_ptr()]


def test_rows_that_cannot_be_solved_stay_as_they_are():
    s = scores(5)
    s[1, 4], s[2, :], s[3, 0] = torch.nan, -torch.inf, torch.inf
    for given in (["bok"] * 5, ["bok", "bok", "softmax", "bok", "softmax"]):
        logits = s.clone()
        status = reshape(logits, given)
        assert status.tolist() == [Status.OK, Status.NAN, Status.FORBIDDEN, Status.INFINITE, Status.OK]
        torch.testing.assert_close(logits[1:4], s[1:4], equal_nan=True, rtol=0, atol=0)
        torch.testing.assert_close(logits[0].exp(), decoder("bok").distribution(s[0]), atol=1e-6, rtol=1e-4)


def test_what_a_decoder_raises_does_not_escape(caplog):
    s = scores(4)
    for _ in range(3):
        logits = s.clone()
        assert reshape(logits, ["softmax", Broken(), "nonsense:x=1", "softmax"]).tolist() == [0, FAILED, FAILED, 0]
        assert torch.equal(logits[1:3], s[1:3])
        torch.testing.assert_close(logits[3], s[3].log_softmax(-1))
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.args[0] for record in told] == ["broken", "nonsense:x=1"]
    assert "it broke" in caplog.text
    assert "Traceback" in caplog.text


def test_a_batch_that_does_not_fit_is_left_alone(caplog):
    s = scores(3)
    logits = s.clone()
    assert reshape(logits, ["softmax"]).tolist() == [FAILED] * 3
    assert reshape(logits, ["softmax"] * 3, seeds=[1]).tolist() == [FAILED] * 3
    assert torch.equal(logits, s)
    assert "3 rows of logits, 1 decoders" in caplog.text


def test_a_decoder_that_finds_no_distribution_is_noticed():
    class Lost(type(decoder("softmax"))):
        def problem(self, scores, context=None):
            raise ValueError("this way there is none")

        def distribution(self, scores, context=None, validate=True):
            return torch.full_like(scores, torch.nan), torch.zeros(len(scores), dtype=torch.int8)

    s = scores(2)
    logits = s.clone()
    assert reshape(logits, [Lost(), "softmax"]).tolist() == [Status.UNSOLVED, 0]
    assert torch.equal(logits[0], s[0])


def test_a_decoder_that_cannot_be_hashed_is_its_own_group():
    @dataclass(frozen=True)
    class Listed(Decoder):
        name = "listed"
        __hash__ = None  # pyright: ignore

        def problem(self, scores, context=None):
            return Problem(scores, NegEntropy())

    s = scores(3)
    logits = s.clone()
    assert reshape(logits, [Listed(), "softmax", Listed()]).tolist() == [0] * 3
    torch.testing.assert_close(logits, s.log_softmax(-1))


def test_a_row_with_a_seed_is_drawn_here():
    s = scores(5)
    seeds, steps = [3, None, 5, 2**63 + 7, 9], torch.tensor([4, 1, 0, 2, 8])
    given = ["bok", "bok", "bok", "top-p", "nonsense"]
    logits = s.clone()
    assert reshape(logits, given, Context(step=steps), seeds).tolist() == [0, 0, 0, 0, FAILED]
    for row in (0, 2, 3):
        seed = seeds[row]
        assert seed is not None
        token = decoder(given[row]).sample(s[row], seeds=seed, step=int(steps[row]))
        assert logits[row, token] == 0
        assert (logits[row] > -torch.inf).sum() == 1
    torch.testing.assert_close(logits[1].exp(), decoder("bok").distribution(s[1]), atol=1e-6, rtol=1e-4)
    assert torch.equal(logits[4], s[4])


def test_a_bad_row_with_a_seed_stays():
    s = scores(2)
    s[0, 1] = torch.nan
    logits = s.clone()
    assert reshape(logits, ["softmax"] * 2, seeds=[1, 2]).tolist() == [Status.NAN, 0]
    torch.testing.assert_close(logits[0], s[0], equal_nan=True)
    assert (logits[1] == 0).sum() == 1


def test_the_context_follows_its_rows():
    s = scores(4)
    mask = torch.rand(4, 300, generator=torch.Generator().manual_seed(3)) < 0.4
    logits = s.clone()
    reshape(logits, ["bok", "softmax", "bok", "softmax"], Context(mask=mask))
    assert (logits[~mask] == -torch.inf).all()
    torch.testing.assert_close(logits[3], s[3].masked_fill(~mask[3], -torch.inf).log_softmax(-1))
    shared = s.clone()
    reshape(shared, ["bok", "softmax", "bok", "softmax"], Context(mask=mask[:1]))
    assert (shared[:, ~mask[0]] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_are_written_back_as_they_came(dtype):
    s = scores(3).to(dtype)
    for given in (["top-p"] * 3, ["top-p", "softmax", "top-p"]):
        logits = s.clone()
        reshape(logits, given)
        assert logits.dtype == dtype
        torch.testing.assert_close(
            logits[0].double().exp(), decoder("top-p").distribution(s[0]).double(), atol=1e-2, rtol=0
        )


def test_nothing_is_read_from_the_device(caplog):
    s = torch.empty(6, 700, device="meta")  # where there is nothing to be read
    reshape(s, ["bok"] * 6)
    reshape(s, ["bok", "top-p", None, "bok", "sparsemax", "top-p"], seeds=[1, None, None, 2, 3, 4])
    assert not caplog.records

    class Reads(type(decoder("softmax"))):
        def distribution(self, scores, context=None, validate=True):
            if bool((scores > 0).any()):
                return super().distribution(scores, context, validate)

    reshape(s, [Reads()] * 6)
    assert "meta" in caplog.text


def test_inside_inference_mode():
    with torch.inference_mode():
        s = scores()
        logits = s.clone()
        assert reshape(logits, ["bok", "softmax"] * 3).tolist() == [0] * 6
        torch.testing.assert_close(logits[1], s[1].log_softmax(-1))


def test_counts_and_what_is_said_of_them(caplog):
    tally = Tally()
    bad = torch.full((3,), int(Status.NAN), dtype=torch.int8)
    for _ in range(5):
        tally.add(bad)
        tally.add(torch.tensor([0, NO_DECODER, 0], dtype=torch.int8))
    assert tally.read() == {"NAN": 15, "OK": 10, "NO_DECODER": 5}
    said = [record.getMessage() for record in caplog.records]
    assert [message.split()[0] for message in said] == ["3", "12"]
    assert all("NaN" in message for message in said)


def test_settings_that_would_distort_are_refused():
    neutral = {"temperature": (1.0, -1.0), "top_k": (-1, 0), "grammar": (None,)}
    refuse_distorting({"temperature": -1.0, "top_k": 0, "max_tokens": 5}, neutral)
    with pytest.raises(ValueError, match=r"temperature=0.7, grammar='x' would .* pass temperature=1.0, grammar=None"):
        refuse_distorting({"temperature": 0.7, "grammar": "x", "top_k": -1}, neutral)


def test_decoders_that_need_what_an_engine_does_not_bring_are_refused():
    refuse_needy(decoder("bok"), "Engine X")
    with pytest.raises(ValueError, match=r"guidance needs another model's logits .* Engine X does not bring"):
        refuse_needy(decoder("guidance"), "Engine X")


def coded(size=6, seed=7):
    return [request_code((seed, index, size), torch.device("cpu")) for index in range(size)]


def drawn(logits, codes, steps, spec="softmax"):
    """The tokens left in each row; −1 where more than one is."""
    logits = logits.clone()
    reshape(logits, [spec] * len(codes), Context(step=torch.tensor(steps)), codes=codes)
    return [row.nonzero().item() if len(row.nonzero()) == 1 else -1 for row in (logits == 0)]


def test_requests_of_a_group_draw_as_the_group_would():
    steps = [scores(6, 300) + step for step in range(5)]
    together = Codes.spread(7, 6)
    expected = [decoder("softmax").sample(s, codes=together).tolist() for s in steps]
    requests = coded()
    for step, s in enumerate(steps):  # each in a batch with others, and one alone
        found = drawn(s[:5], requests[:5], [step] * 5) + drawn(s[5:], requests[5:], [step])
        assert found == expected[step]
    assert len(set(expected[0])) > 3


def test_a_token_thrown_away_costs_nothing():
    s, requests = scores(6, 300), coded()
    first = drawn(s, requests, [0] * 6)
    after = [float(request.after) for request in requests]
    assert drawn(s, requests, [0] * 6) == first, "the same step again"
    assert [float(request.after) for request in requests] == after
    others = coded()
    drawn(scores(6, 300).flip(-1), others, [-3] * 6)  # a part of the prompt
    assert drawn(s, others, [0] * 6) == first
    assert drawn(s, others, [1] * 6) == drawn(s, requests, [1] * 6)


def test_a_text_taken_up_again_goes_on_with_a_new_code():
    s, requests = scores(1, 300).expand(6, -1), coded()
    drawn(s, requests, [9] * 6)
    begun = [float(request.before) for request in requests]
    assert len(set(begun)) == 6
    fresh = [float(request.before) for request in coded()]
    assert not set(begun) & set(fresh)
    many = [request_code((seed, 3, 6), torch.device("cpu")) for seed in range(4000)]
    reshape(torch.zeros(4000, 4), ["softmax"] * 4000, Context(step=torch.full((4000,), 9)), codes=many)
    spots = torch.histc(torch.stack([request.before for request in many]).float(), 10, 0, 1)
    assert stats.chisquare(spots.numpy()).pvalue > 1e-4


def test_rows_with_codes_that_cannot_be_solved_pass_through():
    s, requests = scores(3, 50), coded(3)
    s[1, 4] = torch.nan
    logits = s.clone()
    kinds: list = ["bok", "bok", None]
    assert reshape(logits, kinds, codes=[*requests[:2], None]).tolist() == [0, Status.NAN, NO_DECODER]
    torch.testing.assert_close(logits[1:], s[1:], equal_nan=True)
    assert (logits[0] == 0).sum() == 1
    assert all(0 <= float(request.after) < 1 for request in requests)


def test_places_that_make_no_sense_are_refused():
    assert place_of({"decoder": "bok"}) is None
    assert place_of({"group": -4, "index": 0, "size": 1}) == (-4, 0, 1)
    for given, words in [
        ({"group": 1, "index": 0}, "three whole numbers"),
        ({"group": 1, "index": 0.5, "size": 2}, "three whole numbers"),
        ({"group": True, "index": 0, "size": 2}, "three whole numbers"),
        ({"group": 1, "index": 2, "size": 2}, "0 <= index < size"),
        ({"group": 1, "index": 0, "size": 0}, "0 <= index < size"),
    ]:
        with pytest.raises(ValueError, match=words):
            place_of(given)


def test_decoders_that_count_siblings_are_refused():
    with pytest.raises(ValueError, match="tree-bok counts the samples of a group that share a text; vLLM does not"):
        refuse_siblings(decoder("tree-bok"), "vLLM")
    refuse_siblings(decoder("bok"), "vLLM")
