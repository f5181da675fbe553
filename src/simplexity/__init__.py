"""Decoding as optimisation on the probability simplex: max <q, s> − λ·Ω(q), solved, certified, drawn from."""

from simplexity.certificate import Certificate, certify
from simplexity.context import Context
from simplexity.decoders import decoder, decoders
from simplexity.decoding import Decoder
from simplexity.draw import draw, mode
from simplexity.measures import Description, effective_temperature, entropy
from simplexity.parameters import parameter
from simplexity.problem import Problem, Status
from simplexity.regularisers import KL, Coverage, HalfSquare, NegEntropy, Regulariser, Tsallis, Zero
from simplexity.solvers import ClosedForm, DualRoot, MirrorAscent, project_to_simplex, solve
from simplexity.supports import Allowed, Banned, Everything, Support, Then, TopK, TopP

__version__ = "0.1.0"

__all__ = [
    "KL",
    "Allowed",
    "Banned",
    "Certificate",
    "ClosedForm",
    "Context",
    "Coverage",
    "Decoder",
    "Description",
    "DualRoot",
    "Everything",
    "HalfSquare",
    "MirrorAscent",
    "NegEntropy",
    "Problem",
    "Regulariser",
    "Status",
    "Support",
    "Then",
    "TopK",
    "TopP",
    "Tsallis",
    "Zero",
    "certify",
    "decoder",
    "decoders",
    "draw",
    "effective_temperature",
    "entropy",
    "mode",
    "parameter",
    "project_to_simplex",
    "solve",
]
