"""pass@k, majority@k, their bootstrap intervals, and the frontier of pass@1 and pass@k."""

import math
from collections import Counter
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from simplexity.evaluation.frontier import area_between, area_interval, frontier, matched
from simplexity.evaluation.intervals import PerQuestion, interval, paired_difference, resampled_means
from simplexity.evaluation.scores import Sampled, accuracy, distinct_answers, majority_at_k, pass_at_k

SAMPLES = st.lists(st.tuples(st.sampled_from([None, "1", "2", "3", "4"]), st.booleans()), min_size=1, max_size=7)
QUANTITIES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6)


def over_subsets(row, k, score):
    subsets = list(combinations(row, k))
    return math.fsum(map(score, subsets)) / len(subsets)


def vote(subset, worth):
    votes = Counter(answer for answer, _ in subset if answer is not None)
    if not votes:
        return worth[None]
    leaders = [answer for answer, count in votes.items() if count == max(votes.values())]
    return math.fsum(worth[answer] for answer in leaders) / len(leaders)


def ids(count):
    return tuple(f"q{i}" for i in range(count))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@given(SAMPLES)
@settings(max_examples=150, deadline=None)
def test_every_score_is_the_average_over_all_subsets(row):
    answers, right = [[answer for answer, _ in row]], torch.tensor([[good for _, good in row]])
    graded = {answer: [good for other, good in row if other == answer] for answer, _ in row}
    worth = {answer: sum(goods) / len(goods) for answer, goods in graded.items()}
    for k in range(1, len(row) + 1):
        passed = over_subsets(row, k, lambda subset: any(good for _, good in subset))
        voted = over_subsets(row, k, lambda subset: vote(subset, worth))
        distinct = over_subsets(row, k, lambda subset: len({answer for answer, _ in subset} - {None}))
        assert pass_at_k(right, k).item() == pytest.approx(passed, abs=1e-15)
        assert majority_at_k(answers, right, k).item() == pytest.approx(voted, abs=1e-12)
        assert distinct_answers(answers, k).item() == pytest.approx(distinct, abs=1e-14)


@given(SAMPLES)
@settings(max_examples=50, deadline=None)
def test_one_sample_scores_its_accuracy(row):
    answers, right = [[answer for answer, _ in row]], torch.tensor([[good for _, good in row]])
    mean = accuracy(right).item()
    assert pass_at_k(right, 1).item() == pytest.approx(mean, abs=1e-15)
    assert majority_at_k(answers, right, 1).item() == pytest.approx(mean, abs=1e-12)


def test_ties_are_shared_and_none_never_wins_against_an_answer():
    right = torch.tensor([[True, False, False]])
    assert majority_at_k([["1", "2", "3"]], right, 3).item() == pytest.approx(1 / 3)
    assert majority_at_k([["1", None, None]], right, 3).item() == 1
    assert majority_at_k([[None, None, None]], right, 2).item() == pytest.approx(1 / 3)


def test_graders_that_disagree_are_averaged():
    answers, right = [["1", "1", "2"]], torch.tensor([[True, False, False]])
    assert majority_at_k(answers, right, 3).item() == pytest.approx(0.5, abs=1e-14)


def test_the_order_of_questions_and_samples_does_not_matter():
    answers = [["1", "2", "2", None, "3"], ["7", "7", None, None, "8"]]
    right = torch.tensor([[True, False, False, False, False], [True, True, False, False, False]])
    turned = [row[::-1] for row in answers[::-1]]
    for k in range(1, 6):
        there, back = majority_at_k(answers, right, k), majority_at_k(turned, right.flip(0, 1), k)
        torch.testing.assert_close(there, back.flip(0), rtol=0, atol=1e-14)


def test_pass_at_k_with_ten_thousand_samples():
    n, counts = 10_000, [0, 1, 37, 5_000, 9_999, 10_000]
    right = torch.arange(n) < torch.tensor(counts).unsqueeze(1)
    for k in (1, 2, 100, 5_000, 9_999, 10_000):
        found = pass_at_k(right, k)
        assert found.isfinite().all()
        assert (found.diff() >= 0).all()
        assert found[0] == 0
        assert found[-1] == 1
        assert found[1].item() == k / n
        missed = math.prod((n - 37 - i) / (n - i) for i in range(k)) if k <= n - 37 else 0.0
        assert found[2].item() == pytest.approx(1 - missed, abs=1e-12)


def test_majority_with_ten_thousand_samples_of_two_answers_is_hypergeometric():
    n, c, k = 10_000, 5_100, 101
    answers, right = [["1"] * c + ["2"] * (n - c)], (torch.arange(n) < c).unsqueeze(0)
    ways = sum(math.comb(c, v) * math.comb(n - c, k - v) for v in range(k // 2 + 1, k + 1))
    assert majority_at_k(answers, right, k).item() == pytest.approx(ways / math.comb(n, k), abs=1e-9)


def test_majority_with_many_answers_agrees_with_drawn_subsets():
    n, k, draws = 60, 12, 20_000
    names = [None if i % 11 == 0 else str(int(i**1.5) % 9) for i in range(n)]
    good = torch.tensor([name in ("0", "4") for name in names])
    worth = {name: float(name in ("0", "4")) for name in names}
    found = majority_at_k([names], good.unsqueeze(0), k).item()
    drawn = torch.rand(draws, n, generator=generator()).argsort(1)[:, :k].tolist()
    scores = torch.tensor([vote([(names[i], None) for i in subset], worth) for subset in drawn])
    assert abs(scores.mean().item() - found) < 4 * scores.std().item() / math.sqrt(draws)


@pytest.mark.parametrize("k", [0, -1, 4])
def test_k_outside_the_samples_is_named(k):
    right, answers = torch.ones(1, 3, dtype=torch.bool), [["1", "1", "1"]]
    for score in (
        lambda: pass_at_k(right, k),
        lambda: majority_at_k(answers, right, k),
        lambda: distinct_answers(answers, k),
    ):
        with pytest.raises(ValueError, match=f"k = {k} of n = 3"):
            score()


def test_a_table_that_does_not_fit_is_refused():
    right, answers = torch.ones(2, 2, dtype=torch.bool), [["1", "1"], ["1", "2"]]
    Sampled(("a", "b"), right, answers, entropy=torch.zeros(2, 2))
    with pytest.raises(ValueError, match="2 rows of 2"):
        Sampled(("a", "b"), right, [["1", "1"], ["1"]])
    with pytest.raises(ValueError, match="3 question ids for 2 rows"):
        Sampled(("a", "b", "c"), right, answers)
    with pytest.raises(ValueError, match="share an id"):
        Sampled(("a", "a"), right, answers)
    with pytest.raises(ValueError, match="seconds has the shape"):
        Sampled(("a", "b"), right, answers, seconds=torch.zeros(2))
    with pytest.raises(ValueError, match="2 questions but values"):
        Sampled(("a", "b"), right, answers).per_question(torch.zeros(3))
    with pytest.raises(ValueError, match=r"\[questions, n\]"):
        Sampled(("a", "b"), right[0], answers)


def test_methods_carry_the_questions():
    right, answers = torch.tensor([[True, False], [True, True]]), [["1", "2"], ["1", "1"]]
    sampled = Sampled(("a", "b"), right, answers)
    assert sampled.pass_at(2).questions == ("a", "b")
    assert sampled.accuracy().mean == 0.75
    assert sampled.majority_at(2).values.tolist() == pytest.approx([0.5, 1.0], abs=1e-14)
    assert sampled.distinct().values.tolist() == [2.0, 1.0]


def coverage(simulate, truth, experiments=300, resamples=1000):
    found = [interval(simulate(generator(i)), resamples=resamples, seed=i) for i in range(experiments)]
    return sum(one.low <= truth <= one.high for one in found) / experiments


def test_intervals_cover_at_their_nominal_rate():
    def accuracies(g):
        chance = torch.rand(100, 1, generator=g, dtype=torch.float64) ** 2  # mean 1/3
        return accuracy(torch.rand(100, 4, generator=g) < chance)

    assert 0.91 <= coverage(accuracies, 1 / 3) <= 0.98


def test_intervals_cover_on_few_questions():
    assert 0.92 <= coverage(lambda g: torch.randn(12, generator=g), 0.0, experiments=600) <= 0.98


def test_differences_cover_at_their_nominal_rate():
    covered, names = 0, ids(100)
    for i in range(300):
        g = generator(1000 + i)
        ease = torch.rand(100, 1, generator=g)
        a = PerQuestion(names, pass_at_k(torch.rand(100, 8, generator=g) < ease, 2))
        b = PerQuestion(names, pass_at_k(torch.rand(100, 8, generator=g) < ease**2, 2))
        found = paired_difference(a, b, resamples=1000, seed=i)
        truth = (1 - 1 / 3) - (1 - (1 - 2 / 3 + 1 / 5))  # E (1 − e)², E (1 − e²)²
        covered += found.low <= truth <= found.high
    assert 0.91 <= covered / 300 <= 0.98


def test_pairing_narrows_the_interval_where_questions_are_shared():
    g, names = generator(), ids(200)
    ease = torch.rand(200, generator=g)
    a = PerQuestion(names, ease + 0.1 * torch.randn(200, generator=g))
    b = PerQuestion(names, ease + 0.1 * torch.randn(200, generator=g))
    found, one, other = paired_difference(a, b), interval(a), interval(b)
    apart = math.hypot(one.high - one.low, other.high - other.low)
    assert found.high - found.low < apart / 2
    assert found.estimate == pytest.approx(a.mean - b.mean)
    assert found.low < found.estimate < found.high


def test_an_interval_depends_on_its_seed_alone_and_widens_with_its_level():
    values = torch.rand(50, generator=generator())
    assert interval(values, seed=3) == interval(values, seed=3)
    assert interval(values, seed=3) != interval(values, seed=4)
    wide, narrow = interval(values, level=0.99), interval(values, level=0.8)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_resampled_means_have_the_right_moments_across_chunks(monkeypatch):
    monkeypatch.setattr("simplexity.evaluation.intervals.CHUNK", 1000)
    values = torch.randn(2, 30, generator=generator()).double()
    means = resampled_means(torch.cat([values, values[:1]]), 20_001, seed=0)
    assert means.shape == (20_001, 3)
    assert (means[:, 0] == means[:, 2]).all()
    torch.testing.assert_close(means[:, :2].mean(0), values.mean(1), atol=6e-3, rtol=0)
    torch.testing.assert_close(means[:, :2].var(0), values.var(1, correction=0) / 30, atol=0, rtol=0.05)


def test_one_question_has_no_interval():
    found = interval(torch.tensor([0.25]))
    assert found.estimate == 0.25
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_intervals_refuse_what_they_cannot_answer():
    a = PerQuestion(("a", "b"), torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match="number 1 is 'b' and 'c'"):
        paired_difference(a, PerQuestion(("a", "c"), a.values))
    with pytest.raises(ValueError, match="2 and 1 of them"):
        paired_difference(a, PerQuestion(("a",), a.values[:1]))
    with pytest.raises(ValueError, match="question number 1 is not finite"):
        interval(torch.tensor([0.0, math.nan]))
    with pytest.raises(ValueError, match="one value for each question"):
        interval(torch.tensor([]))
    with pytest.raises(ValueError, match="level = 95"):
        interval(a, level=95)
    with pytest.raises(ValueError, match="resamples = 0"):
        interval(a, resamples=0)


@given(QUANTITIES)
@settings(max_examples=150, deadline=None)
def test_the_frontier_holds_the_points_that_nothing_beats(points):
    kept = {p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)}
    found = frontier(torch.tensor(points).double())
    assert [tuple(p) for p in found.tolist()] == sorted(kept)
    assert (found[:, 1].diff() < 0).all()


def test_the_area_between_two_known_frontiers():
    a = torch.tensor([[0.2, 0.9], [0.6, 0.5], [0.3, 0.2]]).double()  # 1.1 − x on [0.2, 0.6]; the third is beaten
    b = torch.tensor([[0.4, 0.8], [0.5, 0.3], [0.8, 0.0]]).double()  # 2.8 − 5x, then 0.8 − x
    # on [0.4, 0.5] from −0.1 to 0.3, mean 0.1; on [0.5, 0.6] 0.3 throughout
    assert area_between(a, b) == pytest.approx(0.2)
    assert area_between(b, a) == pytest.approx(-0.2)
    assert area_between(a, a) == 0


def test_the_area_of_frontiers_that_share_a_point_or_no_pass_at_1():
    line = torch.tensor([[0.25, 1.0], [0.75, 0.5]])
    assert area_between(torch.tensor([[0.5, 0.5]]), line) == -0.25
    assert area_between(line, torch.tensor([[0.75, 0.25], [1.0, 0.0]])) == 0.25
    assert area_between(line, torch.tensor([[0.875, 0.25], [1.0, 0.0]])) == 0.25
    # with a pass@1 of at least 0.75 the line reaches 0.5, though it was to have more where that need not be
    assert area_between(line, torch.tensor([[0.75, 1.0], [0.875, 0.25]])) == -0.5


def test_a_setting_that_is_beaten_tells_how_far_down_a_family_goes():
    """The best of both in one setting: level to its left, where another of the same family lies."""
    a, b = torch.tensor([[0.5, 0.75], [0.25, 0.5]]), torch.tensor([[0.5, 0.5], [0.0, 0.25]])
    assert area_between(a, b) == 0.25
    assert area_between(torch.tensor([[0.5, 0.75], [0.0, 0.5]]), torch.tensor([[0.25, 1.0], [0.5, 0.5]])) == 0.0


@given(QUANTITIES, QUANTITIES)
@settings(max_examples=100, deadline=None)
def test_the_area_agrees_with_a_sum_over_a_grid(a, b):
    def height(curve, x):
        for (x0, y0), (x1, y1) in pairwise(curve):
            if x0 <= x <= x1:
                return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        return curve[0][1] if x < curve[0][0] else curve[-1][1]

    one, other = torch.tensor(a).double(), torch.tensor(b).double()
    curves = frontier(one).tolist(), frontier(other).tolist()
    high = min(curve[-1][0] for curve in curves)
    low = min(high, max(min(x for x, _ in family) for family in (a, b)))
    found = area_between(one, other)
    middles = [low + (high - low) * (i + 0.5) / 24 for i in range(24)]  # breakpoints are integers, lengths up to 4
    wanted = sum(height(curves[0], x) - height(curves[1], x) for x in middles) / 24
    assert found == pytest.approx(wanted, abs=1e-12)


def family(g, count, settings, lift):
    """Settings on the line y = 1 − x/2 + lift, with noise that the questions share."""
    noise = 0.2 * torch.randn(count, generator=g)
    return [
        (
            PerQuestion(ids(count), x + noise + 0.05 * torch.randn(count, generator=g)),
            PerQuestion(ids(count), 1 - x / 2 + lift + noise + 0.05 * torch.randn(count, generator=g)),
        )
        for x in settings
    ]


def test_the_interval_of_an_area_resamples_points_and_frontiers():
    g = generator()
    a, b = family(g, 60, (0.2, 0.4, 0.6), 0.1), family(g, 60, (0.3, 0.5, 0.7), 0.0)
    found = area_interval(a, b, resamples=500, seed=5)
    points = [torch.tensor([[x.mean, y.mean] for x, y in one]).double() for one in (a, b)]
    assert found.estimate == pytest.approx(area_between(*points), abs=1e-6)
    values = torch.stack([part.values.double() for setting in (*a, *b) for part in setting])
    means = resampled_means(values, 500, seed=5).view(500, 6, 2)
    each = [area_between(one[:3], one[3:]) for one in means]
    areas = sorted(each)
    assert any(math.isclose(found.low, area, abs_tol=1e-12) for area in areas[5:15])
    assert any(math.isclose(found.high, area, abs_tol=1e-12) for area in areas[-15:-5])


def test_areas_cover_at_their_nominal_rate():
    covered = 0
    for i in range(200):
        g = generator(i)
        a, b = family(g, 100, (0.1, 0.4, 0.7), 0.1), family(g, 100, (0.1, 0.4, 0.7), 0.0)
        found = area_interval(a, b, resamples=500, seed=i)
        covered += found.low <= 0.1 <= found.high
    assert 0.91 <= covered / 200 <= 0.985


def test_areas_need_settings_and_the_same_questions():
    a = family(generator(), 20, (0.1, 0.2), 0.0)
    with pytest.raises(ValueError, match="at least one setting"):
        area_interval(a, [])
    with pytest.raises(ValueError, match="the questions differ"):
        area_interval(a, family(generator(), 21, (0.1, 0.2), 0.0))
    with pytest.raises(ValueError, match=r"\[points, 2\]"):
        frontier(torch.zeros(0, 2))
    with pytest.raises(ValueError, match="finite"):
        area_between(torch.tensor([[0.0, math.nan]]), torch.zeros(1, 2))


def test_matching_is_linear_in_log_temperature():
    slope = torch.tensor([1.0, -2.0, 0.5]).double()
    sweep = {t: PerQuestion(ids(3), slope * math.log(t)) for t in (1.0, 0.2, 0.5)}
    for t in (0.2, 0.3, 0.5, 0.9, 1.0):
        torch.testing.assert_close(matched(sweep, t).values, slope * math.log(t), rtol=0, atol=1e-12)
    assert matched(sweep, 0.5).values.tolist() == sweep[0.5].values.tolist()


def test_matching_uses_the_neighbours_alone():
    sweep = {t: PerQuestion(("a",), torch.tensor([v])) for t, v in ((0.25, 9.0), (1.0, 2.0), (4.0, 4.0), (16.0, 9.0))}
    assert matched(sweep, 2.0).values.tolist() == [3.0]


def test_matching_refuses_what_the_sweep_does_not_hold():
    sweep = {t: PerQuestion(("a",), torch.tensor([t])) for t in (0.5, 1.0)}
    for outside in (0.4, 1.1, 0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"outside the sweep, 0\.5 to 1\.0"):
            matched(sweep, outside)
    with pytest.raises(ValueError, match="positive and finite"):
        matched({0.0: sweep[0.5], **sweep}, 0.7)
    with pytest.raises(ValueError, match="the questions differ"):
        matched({**sweep, 2.0: PerQuestion(("b",), torch.tensor([0.0]))}, 0.7)
    with pytest.raises(ValueError, match="no temperatures"):
        matched({}, 0.7)
