"""Top-k sampling: negative entropy on the k best tokens."""

from dataclasses import dataclass

from torch import Tensor

from simplexity import supports
from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.parameters import parameter, temperature
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy


@dataclass(frozen=True)
class TopK(Decoder, name="top-k"):
    """softmax on the k best tokens (Fan et al., 2018)."""

    objective = "max <q,s> − temperature·Σ q log q on the k best tokens"

    k: int | Tensor = parameter(
        50, "tokens to keep; above the vocabulary it keeps all", at_least=1, whole=True, aliases=("top_k",)
    )
    temperature: float | Tensor = temperature()

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        return Problem(scores, NegEntropy(), lam=self.temperature, support=supports.TopK(self.k))
