"""Decoding as optimisation on the probability simplex: max <q, s> − λ·Ω(q), solved, certified, drawn from."""

from simplexity.certificate import Certificate, certify
from simplexity.constraints import Caps, Constraint, EntropyFloor, GroupBounds, KLBall
from simplexity.context import Context
from simplexity.coupling import Codes
from simplexity.cuts import XTC, Epsilon, Eta, MinP, TopH, TopNSigma, Typical
from simplexity.decoders import decoder, decoders
from simplexity.decoding import Decoder
from simplexity.draw import draw, mode
from simplexity.measures import Description, effective_temperature, entropy
from simplexity.parameters import parameter
from simplexity.problem import Problem, Status
from simplexity.regularisers import JS, KL, Coverage, GroupNorm, HalfSquare, NegEntropy, Regulariser, Tsallis, Zero
from simplexity.solvers import ClosedForm, DualRoot, MirrorAscent, project_to_simplex, solve
from simplexity.supports import Allowed, Banned, Everything, Support, Then, TopK, TopP

__version__ = "0.1.0"

__all__ = [
    "JS",
    "KL",
    "XTC",
    "Allowed",
    "Banned",
    "Caps",
    "Certificate",
    "ClosedForm",
    "Codes",
    "Constraint",
    "Context",
    "Coverage",
    "Decoder",
    "Description",
    "DualRoot",
    "EntropyFloor",
    "Epsilon",
    "Eta",
    "Everything",
    "GroupBounds",
    "GroupNorm",
    "HalfSquare",
    "KLBall",
    "MinP",
    "MirrorAscent",
    "NegEntropy",
    "Problem",
    "Regulariser",
    "Status",
    "Support",
    "Then",
    "TopH",
    "TopK",
    "TopNSigma",
    "TopP",
    "Tsallis",
    "Typical",
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
