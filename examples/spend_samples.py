"""Sixteen samples of each sum: the first, the vote, when it was decided, a sharper draw, and a search beside them."""

import re

from simplexity.engines.transformers import generate
from simplexity.models import load_model
from simplexity.spending import beam, majority, power, samples, vote

K, SUMS = 16, ["3 + 8", "6 + 7", "9 + 4", "8 + 7"]
lm = load_model()
inputs = lm.encode([f"2 + 2 = 4\n3 + 6 = 9\n8 + 5 = 13\n{line} =" for line in SUMS], raw=True)
found = generate(
    lm.model, inputs["input_ids"], n=K, seeds=[1, 2, 3, 4], max_new_tokens=4, trace=True, stop=["\n"],
    tokenizer=lm.tokenizer, attention_mask=inputs["attention_mask"],
)  # fmt: skip


def number(sample):
    """The number a text begins with."""
    begins = re.match(r"\s*(\d+)\s", sample.text)
    return begins and begins[1]


def replay(group):
    """What gives the next n samples of a group that is there already."""
    rest = iter(group)
    return lambda n: [next(rest) for _ in range(n)]


print("sum    first  vote  share  decided after  90% sure after  p^3 draw  beam  log p")
prompts = (inputs["input_ids"].unsqueeze(1), inputs["attention_mask"].unsqueeze(1))
for line, group, ids, mask in zip(SUMS, samples(lm, found, K), *prompts, strict=True):
    whole, sharp = majority(group, number), power(group, alpha=3, seed=1).samples[0]
    exact, sure = (vote(replay(group), number, K, confidence=level) for level in (None, 0.9))
    best = beam(lm.model, ids, 4, 3, lm.tokenizer.encode("\n"), mask)
    print(f"{line}  {number(group[0])!s:5}  {whole.answer!s:4}  {whole.share:5.0%}  {exact.cost.samples:13}", end="  ")
    print(f"{sure.cost.samples:14}  {number(sharp)!s:8}  {lm.text(best.tokens).strip():4}  {best.log_p:.2f}")
