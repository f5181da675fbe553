"""Spending K samples: choose among the texts of one prompt, vote, resample, or search, each with its cost.

best_of, rerank    max over the group of a scorer
majority, vote     the answer most samples give; drawing stops once the rest cannot change it
power              a draw from p(x)^α·exp(term(x)) over whole texts
beam_search, beam  max over texts of log p(y) − λ·R(y) + length·|y|
"""

from simplexity.spending.beams import Searched, beam, beam_search
from simplexity.spending.evenness import REGULARISERS, Regulariser, Surprisals
from simplexity.spending.ranking import Chosen, Ranking, Scorer, best_of, length, log_p, log_p_per_token, rerank
from simplexity.spending.resampling import Resampled, power
from simplexity.spending.samples import Cost, Sample, samples
from simplexity.spending.voting import Vote, ahead, majority, vote

__all__ = [
    "REGULARISERS",
    "Chosen",
    "Cost",
    "Ranking",
    "Regulariser",
    "Resampled",
    "Sample",
    "Scorer",
    "Searched",
    "Surprisals",
    "Vote",
    "ahead",
    "beam",
    "beam_search",
    "best_of",
    "length",
    "log_p",
    "log_p_per_token",
    "majority",
    "power",
    "rerank",
    "samples",
    "vote",
]
