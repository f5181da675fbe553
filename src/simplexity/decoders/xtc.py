"""XTC, exclude top choices: negative entropy on a support with a coin in it."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from simplexity import cuts
from simplexity.context import Context
from simplexity.coupling import Codes
from simplexity.decoding import Decoder
from simplexity.draw import Seeds, as_seeds, check_draw, uniform
from simplexity.parameters import parameter, temperature, temperature_last
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy
from simplexity.rows import per_row

COIN = 0x585443  # the stream of the coin; tokens are drawn from stream 0


@dataclass(frozen=True)
class XTC(Decoder, name="xtc"):
    """softmax, but sometimes without the likely tokens, save the least likely of them (p-e-w, 2024; llama.cpp).

    With the given probability, where two tokens or more have probability at least threshold, only the least probable
    of those stays. The coin depends on the row's seed and step alone, and not on the number that draws the token;
    without seeds it comes from torch's generator, anew at each call. A target cannot be asked for.
    """

    objective = "max <q,s> − temperature·Σ q log q, by chance without all but the least of the tokens ≥ threshold"

    probability: float | Tensor = parameter(
        0.5, "how often tokens are left out", at_least=0, at_most=1, aliases=("xtc_probability",)
    )
    threshold: float | Tensor = parameter(
        0.1, "probability from which a token is likely", above=0, at_most=1, aliases=("xtc_threshold",)
    )
    temperature: float | Tensor = temperature()
    temperature_last: bool = temperature_last()

    def check(self) -> None:
        if self.entropy is not None or self.effective_temperature is not None:
            raise ValueError("xtc: entropy and effective_temperature cannot be asked for, chance decides what is cut")

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        rows, device = scores.shape[:-1], scores.device
        if context is None or context.seeds is None:
            coin = torch.rand(rows, dtype=torch.float64, device=device)
        else:
            coin = uniform(as_seeds(context.seeds, rows, device), context.step, COIN)
        fires = coin.unsqueeze(-1) < per_row(self.probability, scores, "probability")
        kept = cuts.XTC(self.threshold, 1.0 if self.temperature_last else self.temperature, fires)
        return Problem(scores, NegEntropy(), lam=self.temperature, support=kept)

    def sample(
        self,
        scores: Tensor,
        generator: torch.Generator | None = None,
        seeds: Seeds | None = None,
        step: int | Tensor | None = None,
        context: Context | None = None,
        validate: bool = True,
        codes: Codes | None = None,
        log_q: bool = False,
    ) -> Any:
        """As every decoder's, with the coin thrown by the same seeds or the same generator."""
        context = Context() if context is None else context
        step = context.step if step is None else step
        rows, device = scores.shape[:-1], scores.device
        check_draw(rows, generator, seeds, step)
        if generator is not None:
            own = torch.randint(-(2**63), 2**63 - 1, rows, generator=generator, device=device)
        else:
            own = context.seeds if seeds is None else as_seeds(seeds, rows, device)
        context = replace(context, seeds=own, step=step)
        return super().sample(scores, generator, seeds, step, context, validate, codes, log_q)
