"""What coupling and counting siblings cost: 64 groups of 8 samples of the embedded model, or fewer.

    python benchmarks/covering.py [--groups N] [--size N] [--rounds N] [--out FILE.json]

A share of a hundredth drowns in the noise of whole runs. So the draw of one step is timed alone, plain and coupled in
turns on the same logits of the model, and their difference is set against the time of a whole step of `generate`.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers

import simplexity
from record import record
from simplexity import Codes, decoder
from simplexity.engines.transformers import generate
from simplexity.models import load_model, quiet_transformers
from simplexity.siblings import Siblings

PROMPT = "Write a long story about a lighthouse keeper who finds a letter in a bottle."
SPECS = ("softmax:temperature=0.8", "top-p:temperature=0.8", "bok:temperature=0.8", "bok:temperature=0.8,solver=exact")
TOKENS = 6


def main() -> None:
    """Time a step, then the draws in it."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--groups", type=int, default=64)
    options.add_argument("--size", type=int, default=8)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    quiet_transformers()
    language_model = load_model()
    model, rows = language_model.model, given.groups * given.size
    model.generation_config.eos_token_id = None
    inputs = language_model.encode([PROMPT] * given.groups)
    ids, mask, kept = inputs["input_ids"], inputs["attention_mask"], []

    def keep(tokens: Any, scores: Any) -> Any:
        kept[:] = [scores.clone(), tokens[:, -1].clone(), [*(kept[2] if kept else []), time.perf_counter()]]
        return scores

    seeds = list(range(given.groups))
    generate(model, ids, SPECS[0], given.size, TOKENS, seeds, attention_mask=mask, logits_processor=[keep])
    logits, last, moments = kept
    step = statistics.median(after - before for before, after in pairwise(moments))  # the prompt is read before
    print(f"\n{language_model.name}: {given.groups} groups of {given.size}, {torch.get_num_threads()} threads")
    print(f"a step of generation: {step * 1e3:.0f} ms")
    print(f"\n{'':36}{'plain ms':>10}{'coupled ms':>12}{'more, of a step':>17}")
    results = []
    for spec in SPECS:
        chosen, own = decoder(spec), torch.arange(rows)
        codes = Codes.spread(range(given.groups), given.size)
        plain, coupled = race(
            given.rounds,
            lambda chosen=chosen, own=own: chosen.sample(logits, seeds=own),
            lambda chosen=chosen, codes=codes: chosen.sample(logits, codes=codes),
        )
        share = (coupled - plain) / step
        print(f"{spec:36}{plain * 1e3:10.1f}{coupled * 1e3:12.1f}{share:16.2%}")
        results.append({"decoder": spec, "plain": plain, "coupled": coupled, "step": step, "share": share})

    def track() -> None:
        siblings = Siblings(rows, given.size)
        siblings.follow(last)
        siblings.count.sum()

    (tracking,) = race(given.rounds, track)
    print(f"{'counting siblings':36}{'':10}{tracking * 1e3:12.2f}{tracking / step:16.2%}")
    results.append({"decoder": "siblings", "coupled": tracking, "step": step, "share": tracking / step})
    record(given.out, results, simplexity, torch, transformers)


def race(rounds: int, *runs: Callable[[], Any]) -> list[float]:
    """The median seconds of each, taken in turns; the first round warms up."""
    times: list[list[float]] = [[] for _ in runs]
    for round_ in range(rounds + 1):
        for run, spent in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            if round_:
                spent.append(time.perf_counter() - start)
    return [statistics.median(spent) for spent in times]


if __name__ == "__main__":
    main()
