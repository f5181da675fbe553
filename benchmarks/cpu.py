"""From logits to a token on a CPU: each decoder beside the transformers chain, timed in turn in one run.

    python benchmarks/cpu.py [--quick] [--out FILE.json]

Every round times each contender in turn, a short burst each, so that a busy moment hits all of them; the
table shows medians.
"/read" is how many bare reads of the logits it takes.
"plain" is the chain temperature + softmax + multinomial, "own" the chain with the warper a decoder replaces.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import simplexity
from record import record
from simplexity import decoder

T = 0.8
BURST = 5
SIZES = [(size, batch, torch.float32) for size in (49_152, 151_936, 262_144) for batch in (1, 16, 32, 256)]
SIZES += [(size, batch, torch.bfloat16) for size in (49_152, 151_936, 262_144) for batch in (1, 32, 256)]
QUICK = [(49_152, 1, torch.float32), (151_936, 16, torch.float32)]
CHAINS: dict[str, list[Any]] = {
    "plain": [],
    "top-k": [TopKLogitsWarper(50)],
    "top-p": [TopPLogitsWarper(0.9)],
    "min-p": [MinPLogitsWarper(0.1)],
}
READ = "amax (a bare read)"
SPECS = {
    "greedy": "plain",
    f"softmax:temperature={T}": "plain",
    f"top-k:temperature={T}": "top-k",
    f"top-p:temperature={T}": "top-p",
    f"min-p:p=0.1,temperature={T}": "min-p",
    "sparsemax": "plain",
    "entmax": "plain",
    "entmax:alpha=1.2": "plain",
    f"kl:temperature={T}": "plain",
    f"bok:temperature={T}": "plain",
    f"bok:temperature={T},weights=top-m": "plain",
    f"bok:temperature={T},solver=exact": "plain",
    f"bok:temperature={T},solver=exact,weights=uniform": "plain",
}


def chain(warpers: list[Any]) -> Callable[[Tensor], Tensor]:
    """What transformers' sampling does with a row of logits."""
    first = TemperatureLogitsWarper(T)

    def run(scores: Tensor) -> Tensor:
        ids = torch.empty(0)
        scores = first(ids, scores)  # pyright: ignore[reportArgumentType]
        for warper in warpers:
            scores = warper(ids, scores)
        return torch.multinomial(torch.softmax(scores, -1), 1)

    return run


def logits(shape: str, batch: int, size: int) -> Tensor:
    """Peaked: a head of a few hundred tokens above a broad floor, as models make them. Flat: standard normal."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(batch, size, generator=g)
    if shape == "flat":
        return x
    x = 2.5 * x - 12
    head = torch.randint(0, size, (batch, 300), generator=g)
    return x.scatter_add_(-1, head, 25 * torch.rand(batch, 300, generator=g).pow(3))


def race(contenders: dict[str, Callable[[Tensor], Any]], scores: Tensor, quick: bool) -> dict[str, float]:
    """Median µs of each contender."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    small, middling = scores.numel() < 2**18, scores.numel() < 2**23
    rounds = 2 if quick or not middling else 11 if small else 3
    for _ in range(rounds):
        for name, run in contenders.items():
            run(scores)  # warm caches, as for everyone else
            for _ in range(BURST if middling else 1):
                start = time.perf_counter()
                run(scores)
                times[name].append(time.perf_counter() - start)
    return {name: 1e6 * statistics.median(t) for name, t in times.items()}


def main() -> None:
    """Run the races and print a table for each size."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="fewer rounds and sizes")
    options.add_argument("--out", type=Path, help="write the numbers as JSON")
    arguments = options.parse_args()
    contenders: dict[str, Callable[[Tensor], Any]] = {READ: lambda x: x.amax(-1)}
    contenders |= {f"chain {name}": chain(w) for name, w in CHAINS.items()}
    contenders |= {spec: decoder(spec).sample for spec in SPECS}
    results = []
    for shape in ("peaked", "flat"):
        for size, batch, dtype in QUICK if arguments.quick else SIZES:
            us = race(contenders, logits(shape, batch, size).to(dtype), arguments.quick)
            kind = str(dtype).removeprefix("torch.")
            results.append({"shape": shape, "vocabulary": size, "batch": batch, "dtype": kind, "us": us})
            print(f"\n{shape} logits, V = {size:,}, batch {batch}, {kind}, {torch.get_num_threads()} threads")
            print(f"{'':46}{'µs':>9}{'GB/s':>7}{'/read':>7}{'plain/it':>10}{'own/it':>9}")
            for name, t in us.items():
                own, speed = SPECS.get(name, "plain"), batch * size * dtype.itemsize / t / 1e3
                ratios = f"{us['chain plain'] / t:9.1f}x{us[f'chain {own}'] / t:8.1f}x"
                print(f"{name:46}{t:9.0f}{speed:7.2f}{t / us[READ]:7.1f}{ratios}")
    record(arguments.out, results, simplexity, torch, transformers)


if __name__ == "__main__":
    main()
