"""Several decoders on one prompt: their texts, their speed, and what each did to the distribution on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simplexity import measures
from simplexity.decoders import decoder
from simplexity.engines.other_model import OtherModel
from simplexity.engines.transformers import generate
from simplexity.models import LanguageModel


@dataclass(frozen=True)
class Compared:
    """One decoder's n samples, and means over all tokens it wrote."""

    spec: str
    texts: list[str]
    tokens: int
    seconds: float
    entropy: float  # of q, nats
    effective_temperature: float
    left_best: float  # how often the token chosen was not the model's own best
    entropies: list[float]  # by step, mean over the samples still writing

    @property
    def speed(self) -> float:
        """Tokens per second, all samples together."""
        return self.tokens / self.seconds

    @property
    def distinct(self) -> int:
        """How many of the texts differ."""
        return len(set(self.texts))


def compare(
    language_model: LanguageModel,
    prompt: str,
    specs: Sequence[str],
    n: int = 4,
    max_new_tokens: int = 64,
    seed: int = 0,
    raw: bool = False,
    done: Callable[[Compared], None] = lambda _: None,
    other: OtherModel | None = None,
    coupled: bool = False,
) -> list[Compared]:
    """n samples of each decoder from one seed; `done` is told of each as it is finished.

    `other` reads along with the decoders of two models, and with no others.
    """
    inputs = language_model.encode([prompt], raw)
    for spec in specs:
        decoder(spec)  # a typing error should not cost the decoders before it
    results = []
    mask, ids = inputs["attention_mask"], inputs["input_ids"]
    generate(language_model.model, ids, n=n, max_new_tokens=2, attention_mask=mask)  # the first call of all is slow
    for spec in specs:
        found = generate(
            language_model.model,
            ids,
            attention_mask=mask,
            decoder=spec,
            n=n,
            max_new_tokens=max_new_tokens,
            seeds=[seed],
            trace=True,
            other=other if decoder(spec).reads("other") else None,
            coupled=coupled,
        )
        assert found.entropy is not None
        assert found.effective_temperature is not None
        assert found.best is not None
        written = found.written
        count = int(written.sum())
        tau, entropy = found.effective_temperature[written], found.entropy[written]
        telling = measures.tells_temperature(tau, entropy)
        tau = tau[telling] if bool(telling.any()) else tau[tau.isfinite()]  # greedy: 0 everywhere
        by_step = (found.entropy * written).sum(0) / written.sum(0)
        result = Compared(
            spec,
            [language_model.text(row) for row in found.tokens],
            count,
            found.seconds,
            abs(entropy.mean().item()),
            tau.mean().item() if len(tau) else float("nan"),
            1 - found.best[written].double().mean().item(),
            by_step.abs().tolist(),
        )
        done(result)
        results.append(result)
    return results
