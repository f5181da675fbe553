"""What K samples cover: distinct beginnings and the model's probability of them, against the quality of one sample.

    python benchmarks/coverage.py [--size K] [--tokens N] [--groups N] [--only NAME] [--out FILE.json]

For each prompt, groups of K texts of N tokens by the embedded model. `distinct`: different texts of a group; `covered`:
the sum of their probabilities under the model at temperature 1; `log p`: that of one sample, the mean over all. A
decoder is better where it covers more at the same log p. Twenty arms take a quarter of an hour on two cores.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import simplexity
from record import record
from simplexity.engines.transformers import Generated, generate
from simplexity.models import load_model, quiet_transformers

PROMPTS = (
    "Name a colour.", "Name a river in Europe.", "Give me a word that rhymes with moon.", "What is 17 times 3?",
    "Suggest a name for a cat.", "Which animal is the fastest?", "Write the first line of a poem about rain.",
    "What should I cook tonight?", "Complete: the opposite of hot is", "Name a famous painter.",
    "What is the capital of Australia?", "Give me a reason to learn chess.", "Write a Python expression for pi.",
    "Translate 'good morning' into French.", "Who wrote Hamlet?", "What year did the war end?",
    "Invent a title for a detective story.", "Which planet is the largest?", "Say something kind.",
    "Name three fruits.", "How do I open a jar?", "What is the boiling point of water?", "What comes after Tuesday?",
    "Describe the sea in one line.",
)  # fmt: skip
BOTH = (False, True)  # independent, coupled
ARMS = [
    *((f"softmax:temperature={t}", coupled) for t in (0.3, 0.4, 0.5, 0.6, 0.8, 1.0) for coupled in BOTH),
    *((f"top-p:p=0.9,temperature={t}", coupled) for t in (0.6, 1.0) for coupled in BOTH),
    *((f"bok:solver=exact,scores=none,beta=1,temperature={t}", coupled) for t in (0.5,) for coupled in BOTH),
    *((f"tree-bok:beta={beta},alone=0.5", True) for beta in (2, 5, 10)),
    *((f"tree-bok:beta=0,alone={alone},together={together}", True) for alone, together in ((0.3, 0.6), (0.3, 0.8))),
    ("tree-bok:beta=2,weights=top-m,m=4,alone=0.4", True),
]


def main() -> None:
    """One arm after the other, all prompts at once."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--size", type=int, default=8)
    options.add_argument("--tokens", type=int, default=5)
    options.add_argument("--groups", type=int, default=2, help="groups of a prompt")
    options.add_argument("--only", default="", help="arms whose name begins like this")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    quiet_transformers()
    language_model = load_model()
    inputs = language_model.encode([prompt for prompt in PROMPTS for _ in range(given.groups)])
    count, results = len(PROMPTS) * given.groups, []
    print(f"{language_model.name}: {count} groups of {given.size}, {given.tokens} tokens of {len(PROMPTS)} prompts")
    print(f"\n{'':52}{'log p':>8}{'distinct':>10}{'covered':>9}")
    for spec, coupled in (arm for arm in ARMS if arm[0].startswith(given.only)):
        found = generate(
            language_model.model, inputs["input_ids"], spec, given.size, given.tokens, list(range(count)),
            attention_mask=inputs["attention_mask"], coupled=coupled,
        )  # fmt: skip
        log_p = probabilities(language_model.model, inputs, found)
        ended = torch.where(found.written, found.tokens, -1).tolist()
        groups = [range(i, i + given.size) for i in range(0, len(ended), given.size)]
        held = [{tuple(ended[row]): log_p[row].exp().item() for row in group} for group in groups]
        row = {
            "decoder": spec,
            "coupled": coupled,
            "log_p": log_p.mean().item(),
            "distinct": statistics.mean(len(texts) for texts in held),
            "covered": statistics.mean(sum(texts.values()) for texts in held),
        }
        name = f"{spec}{' coupled' if coupled else ''}"
        print(f"{name:52}{row['log_p']:8.2f}{row['distinct']:10.2f}{row['covered']:9.3f}", flush=True)
        results.append(row)
    record(given.out, results, simplexity, torch, transformers)


def probabilities(model: Any, inputs: dict[str, Tensor], found: Generated) -> Tensor:
    """log p of each text under the model at temperature 1, float64 `[rows]`: all of it read at once."""
    n = len(found.tokens) // len(inputs["input_ids"])
    ids = torch.cat([inputs["input_ids"].repeat_interleave(n, 0), found.tokens], 1)
    mask = torch.cat([inputs["attention_mask"].repeat_interleave(n, 0), torch.ones_like(found.tokens)], 1)
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.inference_mode():
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=places, logits_to_keep=found.tokens.shape[1] + 1
        ).logits
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, found.tokens.unsqueeze(-1)).squeeze(-1)
    return (chosen.double() * found.written).sum(-1)


if __name__ == "__main__":
    main()
