"""What `covering_search.py` found, of files under results/covering.

    python benchmarks/covering_report.py results/covering/held-out-*.json

A group is held against two things. Against independent draws of a softmax with the same pass@1, read between the
temperatures of its sweep, in whichever of the files they are. And against as many of its own samples from different
groups, which are independent and have the very same pass@1: what is left is the work of the group alone, and far less
noise.

The room is what the best group could gain that keeps each question's own share r of right samples: Σ min(1, k·r).
"""

import argparse
import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covering_search import independent
from simplexity.evaluation.intervals import Interval, interval
from simplexity.evaluation.scores import Sampled

RESAMPLES = 2000
SAME = ("task", "group", "model", "tokens")  # of runs whose samples can be compared
TEMPERATURE = re.compile(r"softmax t=[\d.]+")


def sampled(arm: str, found: dict[str, Any], k: int) -> Sampled:
    """The samples of an arm, in groups or independent."""
    questions = sorted(found["right"])
    right = torch.tensor([[c == "1" for c in found["right"][q]] for q in questions])
    said = found.get("answers", {})
    answers = [[None if x < 0 else str(x) for x in said.get(q, [0] * right.shape[1])] for q in questions]
    return Sampled(tuple(questions), right, answers, coupled=1 if independent(arm) else k)


def apart(samples: Sampled, k: int) -> Tensor:
    """pass@k of samples from k different groups, `[questions]`: 1 − e_k(f) / C(G, k), f what is wrong of a group."""
    wrong = 1 - samples.correct.double().unflatten(1, (-1, samples.coupled)).mean(-1)
    groups = wrong.shape[1]
    sums = torch.zeros(len(wrong), k + 1, dtype=torch.float64)  # of all products of 0, 1, … k of them
    sums[:, 0] = 1
    for group in wrong.unbind(1):
        sums[:, 1:] += sums[:, :-1].clone() * group.unsqueeze(-1)
    return 1 - sums[:, k] / math.comb(groups, k)


def above_softmax(one: Sampled, sweep: list[Sampled], k: int) -> Interval:
    """pass@k minus that of softmax at equal pass@1, between the temperatures of the sweep."""
    x, y = one.pass_at(1).values, one.pass_at(k).values
    xs, ys = (torch.stack([s.pass_at(size).values for s in sweep]) for size in (1, k))

    def gain(weights: Tensor) -> float:
        at, level = float(weights @ x), float(weights @ y)
        curve = sorted(zip((xs @ weights).tolist(), (ys @ weights).tolist(), strict=True))
        if at <= curve[0][0] or at >= curve[-1][0]:
            return level - curve[0 if at <= curve[0][0] else -1][1]
        for (left, low), (right, high) in pairwise(curve):
            if left <= at <= right:
                return level - low - (high - low) * (at - left) / max(right - left, 1e-12)
        raise AssertionError

    n, g = len(x), torch.Generator().manual_seed(0)
    counts = torch.stack([torch.bincount(torch.randint(n, (n,), generator=g), minlength=n) for _ in range(RESAMPLES)])
    found = sorted(gain(row / n) for row in counts.double())
    return Interval(
        gain(torch.full((n,), 1 / n, dtype=torch.float64)), found[RESAMPLES // 40], found[-(RESAMPLES // 40)]
    )


def told(found: Interval) -> str:
    """An interval in points."""
    return f"{100 * found.estimate:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def main() -> None:
    """Print a table for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    runs = [json.loads(path.read_text()) for path in parser.parse_args().files]
    for run in runs:
        k, arms = run["group"], {arm: sampled(arm, found, run["group"]) for arm, found in run["arms"].items()}
        alike = (other["arms"].items() for other in runs if all(other[x] == run[x] for x in SAME))
        sweep = [sampled(arm, found, k) for named in alike for arm, found in named if TEMPERATURE.fullmatch(arm)]
        votes = all("answers" in found for found in run["arms"].values())
        print(f"\n{run['task']}; {run['samples']} samples in groups of {k}, 95% intervals")
        print(f"| | pass@1 | pass@{k} | maj@{k} | above softmax | above different groups | room |")
        print("|---|---|---|---|---|---|---|")
        for arm, samples in arms.items():
            cells = [f"{100 * samples.pass_at(size).mean:.1f}" for size in (1, k)]
            cells.append(f"{100 * samples.majority_at(k).mean:.1f}" if votes else "")
            base = apart(samples, k) if samples.coupled > 1 else samples.pass_at(k).values
            room = (k * samples.accuracy().values).clamp_max(1.0) - base
            if samples.coupled > 1:
                cells.append(told(above_softmax(samples, sweep, k)) if len(sweep) > 1 else "")
                cells.append(told(interval(samples.per_question(samples.pass_at(k).values - base))))
            else:
                cells += ["", ""]
            print(f"| {arm} | {' | '.join(cells)} | {100 * room.mean():.1f} |")


if __name__ == "__main__":
    main()
