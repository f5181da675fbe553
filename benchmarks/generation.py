"""What a decoder costs inside `model.generate`: the embedded model under transformers' own sampling and under ours.

    python benchmarks/generation.py [--tokens N] [--rounds N] [--out FILE.json]

Rounds alternate between the two, so that a busy moment hits both; the table shows medians and their ratio.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import simplexity
from record import record
from simplexity.engines.transformers import generate
from simplexity.models import load_model, quiet_transformers

PROMPT = "Write a long story about a lighthouse keeper who finds a letter in a bottle."
SPECS = ("softmax:temperature=0.8", "top-p:temperature=0.8", "bok:temperature=0.8", "bok:temperature=0.8,solver=exact")


def main() -> None:
    """Race, batch by batch."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tokens", type=int, default=48)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--out", type=Path)
    arguments = options.parse_args()
    quiet_transformers()
    language_model = load_model()
    model, results = language_model.model, []
    for batch in (1, 8):
        inputs = language_model.encode([PROMPT] * batch)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        # no end token: every run writes the same number of tokens
        model.generation_config.eos_token_id = None

        def theirs(ids: Any = ids, mask: Any = mask) -> None:
            model.generate(
                ids, attention_mask=mask, do_sample=True, temperature=0.8, top_k=0, max_new_tokens=arguments.tokens
            )

        contenders: dict[str, Callable[[], Any]] = {"transformers, temperature 0.8": theirs}
        for spec in SPECS:
            contenders[spec] = lambda spec=spec, ids=ids, mask=mask: generate(
                model, ids, spec, max_new_tokens=arguments.tokens, attention_mask=mask
            )
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for round_ in range(arguments.rounds + 1):
            for name, run in contenders.items():
                start = time.perf_counter()
                run()
                if round_:  # the first warms up
                    times[name].append((time.perf_counter() - start) / arguments.tokens * 1e3)
        base = statistics.median(times["transformers, temperature 0.8"])
        print(f"\n{language_model.name}, batch {batch}, {arguments.tokens} tokens, {torch.get_num_threads()} threads")
        print(f"{'':44}{'ms/token':>10}{'ratio':>8}")
        for name, values in times.items():
            middle = statistics.median(values)
            print(f"{name:44}{middle:10.2f}{middle / base:8.3f}")
            results.append({"batch": batch, "decoder": name, "ms": middle, "ratio": middle / base})
    record(arguments.out, results, simplexity, torch, transformers)


if __name__ == "__main__":
    main()
