"""What constraint sets cost over a whole vocabulary: 256 rows of 151,936 at once, beside a softmax of the same rows.

    python benchmarks/constraints.py [--rows N] [--size N] [--out FILE.json]

Some rows are solved again in float64, and the gap and violation of those are shown, as is the distance between the two.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import simplexity
from record import record
from simplexity import Caps, EntropyFloor, GroupBounds, KLBall, NegEntropy, Problem, Zero, certify, solve

GROUPS, AGAIN = 50, 4


def main() -> None:
    """One set after the other."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=256)
    options.add_argument("--size", type=int, default=151_936)
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    g = torch.Generator().manual_seed(0)
    s = torch.randn(given.rows, given.size, generator=g) * 2
    s[:, :300] += 8 * torch.rand(given.rows, 300, generator=g)
    reference = torch.randn(given.rows, given.size, generator=g)
    index = torch.randint(-1, GROUPS, (given.size,), generator=g)
    lower = torch.rand(given.rows, GROUPS, generator=g) * 0.01
    upper = lower + torch.rand(given.rows, GROUPS, generator=g) * 0.1 + 0.02
    bounds = lambda n: GroupBounds(index, lower[:n], upper[:n])  # noqa: E731
    sets: dict[str, tuple[Any, float, Callable[[int], tuple[Any, ...]]]] = {
        "none: softmax": (NegEntropy(), 1.0, lambda n: ()),
        "caps of 0.01": (NegEntropy(), 1.0, lambda n: (Caps(0.01),)),
        f"bounds on {GROUPS} groups": (NegEntropy(), 1.0, lambda n: (bounds(n),)),
        "bounds and caps": (NegEntropy(), 1.0, lambda n: (bounds(n), Caps(0.01))),
        "entropy of 5 nats": (NegEntropy(), 0.3, lambda n: (EntropyFloor(5.0),)),
        "no omega, caps of 0.1": (Zero(), 0.0, lambda n: (Caps(0.1),)),
        "no omega, KL within 0.5": (Zero(), 0.0, lambda n: (KLBall(0.5, reference[:n]),)),
    }
    print(f"{given.rows} rows of {given.size:,}, float32, {torch.get_num_threads()} threads; {AGAIN} rows in float64")
    print(f"\n{'':26}{'seconds':>9}{'ratio':>8}{'gap':>10}{'violation':>11}{'distance':>10}")
    results: list[dict[str, Any]] = []
    for name, (omega, lam, constraints) in sets.items():

        def posed(rows: Tensor, omega: Any = omega, lam: float = lam, constraints: Any = constraints) -> Problem:
            return Problem(rows, omega, lam=lam, constraints=constraints(len(rows)))

        start = time.perf_counter()
        q = solve(posed(s))
        seconds = time.perf_counter() - start
        few = posed(s[:AGAIN].double())
        exact = solve(few)
        certificate = certify(few, exact)
        gap, broken = certificate.gap.max().item(), certificate.violation.max().item()
        distance = 0.5 * (q[:AGAIN].double() - exact).abs().sum(-1).max().item()
        ratio = seconds / (results[0]["seconds"] if results else seconds)
        print(f"{name:26}{seconds:9.1f}{ratio:8.0f}{gap:10.0e}{broken:11.0e}{distance:10.0e}", flush=True)
        results.append({"set": name, "seconds": seconds, "gap": gap, "violation": broken, "distance": distance})
    record(given.out, results, simplexity, torch)


if __name__ == "__main__":
    main()
