"""What a decoder did at each step of a text: log q and log p of its tokens, q's entropy and effective temperature."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from simplexity import measures
from simplexity.context import Context
from simplexity.draw import mode
from simplexity.kernels import moments_on_gpu

if TYPE_CHECKING:
    from simplexity.decoding import Decoder


@dataclass
class Trace:
    """What happened at each step, one entry of `[rows]` a step, or of `every` so many."""

    every: int = 1
    log_q: list[Tensor] = field(default_factory=list)
    log_p: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    effective_temperature: list[Tensor] = field(default_factory=list)
    best: list[Tensor] = field(default_factory=list)  # whether the model's own best token was chosen
    seconds: float = 0.0  # spent on all this

    def add(self, decoder: Decoder, scores: Tensor, context: Context, tokens: Tensor) -> None:
        """What the decoder's q and the model's p say of the tokens drawn."""
        start = time.perf_counter()
        log_q, _ = decoder.log_distribution(scores, context)
        moments = moments_on_gpu(scores)
        chosen, scores = tokens.unsqueeze(-1), scores.to(log_q.dtype)
        self.log_q.append(log_q.gather(-1, chosen).squeeze(-1))
        entropy = measures.entropy(log_q.exp_())
        self.log_p.append((scores.gather(-1, chosen) - scores.logsumexp(-1, keepdim=True)).squeeze(-1))
        self.entropy.append(entropy)
        self.effective_temperature.append(measures.effective_temperature(scores, entropy, moments))
        self.best.append(tokens == mode(scores))
        self.seconds += time.perf_counter() - start
