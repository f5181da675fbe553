"""Entropy-adaptive temperature: negative entropy, at a temperature that each row's own entropy sets.

    T = temperature · N^(theta / H),   H the entropy of softmax(s) in nats, N = 0.8

EDT (Zhang et al., 2024): nearly greedy where the model is sure, up to `temperature` where it is not.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from simplexity.context import Context
from simplexity.decoding import Decoder
from simplexity.measures import entropy_at
from simplexity.parameters import parameter, temperature
from simplexity.problem import Problem
from simplexity.regularisers import NegEntropy

BASE = 0.8  # N in the paper
COLDEST = 1e-30  # any score below the best gets nothing from there on, and the division stays finite


@dataclass(frozen=True)
class Adaptive(Decoder, name="adaptive"):
    """softmax(s / T), T = temperature·0.8^(theta/H), H the entropy of softmax(s) (Zhang et al., 2024: EDT).

    The paper tunes theta by task; 1 is this library's default.
    """

    objective = "max <q,s/T> − Σ q log q,  T = temperature·0.8^(theta/H(p))"

    theta: float | Tensor = parameter(1.0, "how much a low entropy cools; 0 is softmax", at_least=0)
    temperature: float | Tensor = temperature()

    def problem(self, scores: Tensor, context: Context | None = None) -> Problem:
        entropy = entropy_at(scores, 1.0).unsqueeze(-1).clamp_min(COLDEST)
        cooled = (self.temperature * (self.theta * math.log(BASE) / entropy).exp()).clamp_min(COLDEST)
        best = scores.amax(-1, keepdim=True)
        return Problem((scores - best) / cooled.to(scores.dtype), NegEntropy())
