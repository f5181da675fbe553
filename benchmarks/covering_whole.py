"""What coupling and counting siblings cost a whole generation: 64 groups of 8 samples, plain and coupled in turns.

    python benchmarks/covering_whole.py --model MODEL [--groups N] [--size N] [--tokens N] [--rounds N] [--out FILE]

For a GPU, where thousands of rows are written from graphs and a generation takes seconds; texts do not end, so that all
are equally long. On a CPU a hundredth drowns in the noise: see covering.py.
"""

import argparse
import statistics
from pathlib import Path

import torch
import transformers

import simplexity
from record import record
from simplexity.engines.many_rows import ManyRows
from simplexity.models import load_model, quiet_transformers

PROMPT = "Write a long story about a lighthouse keeper who finds a letter in a bottle."
PAIRS = [(spec, spec) for spec in ("softmax:temperature=0.8", "top-p:temperature=0.8", "bok:temperature=0.8")]
PAIRS += [("softmax:temperature=0.8", "tree-bok:beta=0,alone=0.8"), ("bok:solver=exact", "tree-bok:beta=4,alone=0.8")]


def main() -> None:
    """One line for each decoder and what it is held against."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model")
    options.add_argument("--groups", type=int, default=64)
    options.add_argument("--size", type=int, default=8)
    options.add_argument("--tokens", type=int, default=256)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    quiet_transformers()
    found = load_model(given.model)
    prompt, rows = found.encode([PROMPT])["input_ids"][0].tolist(), given.groups * given.size
    many = ManyRows(found.model, rows, len(prompt) + given.tokens)
    print(f"\n{found.name}: {given.groups} groups of {given.size}, {given.tokens} tokens, {many.device}")
    print(f"\n{'':28}{'plain s':>10}{'':4}{'coupled':28}{'s':>8}{'more':>9}")

    def seconds(spec: str, coupled: bool, turn: int) -> float:
        seeds = torch.arange(given.groups) + turn * given.groups  # texts differ in how hard they are to draw
        with torch.inference_mode():
            made = many.generate(
                [prompt] * given.groups, spec, given.size, given.tokens, seeds, [-1], given.tokens, coupled
            )
        return made.seconds

    results = []
    for spec, other in PAIRS:
        # the first round compiles and captures
        times = [(seconds(spec, False, turn), seconds(other, True, turn)) for turn in range(given.rounds + 1)][1:]
        plain, coupled = (statistics.median(column) for column in zip(*times, strict=True))
        more = statistics.median(b / a for a, b in times) - 1
        print(f"{spec:28}{plain:10.3f}{'':4}{other:28}{coupled:8.3f}{more:9.1%}", flush=True)
        results.append({"plain": spec, "coupled": other, "plain_s": plain, "coupled_s": coupled, "more": more})
    record(given.out, results, simplexity, torch, transformers)


if __name__ == "__main__":
    main()
