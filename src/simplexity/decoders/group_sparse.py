"""Group sparsity: mass gathers in few groups of tokens, and spreads out inside them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.groups import Groups
from simplexity.parameters import parameter, temperature
from simplexity.problem import Problem
from simplexity.regularisers import GroupNorm, NegEntropy


@dataclass(frozen=True)
class GroupSparse(Decoder, name="group-sparse"):
    """softmax with a price on the norm of each group of tokens (the group lasso's: Yuan and Lin, 2006).

    Groups are lists of token ids that do not overlap, given from Python or JSON; other tokens bear no price.
    """

    objective = "max <q,s> − temperature·(Σ q log q + weight·Σ ‖q_g‖)"

    groups: Sequence[Sequence[int]] = parameter((), "lists of token ids", listed=True)
    weight: float | Tensor = parameter(1.0, "the price of a norm, beside the entropy's 1", at_least=0)
    temperature: float | Tensor = temperature()

    def check(self) -> None:
        object.__setattr__(self, "_groups", Groups(self.groups, self.name))

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        omega = NegEntropy()
        if self.groups:
            omega = omega + self.weight * GroupNorm(getattr(self, "_groups"))  # noqa: B009
        return Problem(scores, omega, lam=self.temperature)
