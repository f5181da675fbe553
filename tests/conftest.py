import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything loads the kernels, doctests included

# two workers on two cores: threads inside each would only wait for one another
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


INF = float("inf")


def rows_of(kind: str) -> torch.Tensor:
    """The shapes of scores every decoder must cope with, `[3, V]`."""
    g = torch.Generator().manual_seed(1)
    normal = torch.randn(3, 257, generator=g)
    if kind == "normal":
        return 3 * normal
    if kind == "peaked":
        return 40 * normal
    if kind == "flat":
        return 1e-3 * normal
    if kind == "constant":
        return torch.zeros(3, 64)
    if kind == "tied":
        return normal.round()
    if kind == "masked":
        scores = 3 * normal
        scores[0, 1:] = -INF  # one token left
        scores[1, ::2] = -INF
        return scores
    if kind == "one token":
        return normal[:, :1]
    if kind == "huge":
        return 1e4 * normal + 1e6
    if kind == "bfloat16":
        return (3 * normal).bfloat16()
    if kind == "float16":
        return (3 * normal).half()
    if kind == "float64":
        return 3 * normal.double()
    raise ValueError(kind)


KINDS = [
    "normal",
    "peaked",
    "flat",
    "constant",
    "tied",
    "masked",
    "one token",
    "huge",
    "bfloat16",
    "float16",
    "float64",
]


def surroundings(scores: torch.Tensor) -> Any:
    """A context with all a decoder may need, each row's a function of its own scores up to a constant."""
    from simplexity import Context

    scores = scores.double()
    below = (scores - scores.amax(-1, keepdim=True)).nan_to_num(0.0).clamp_min(-6.0)
    wave = torch.sin(torch.arange(scores.shape[-1]).double())
    return Context(other=0.5 * below + wave, rewards=2 * wave - 0.1 * below)


class Surrounded:
    """A decoder that needs more than the scores, and finds it wherever it is called."""

    def __init__(self, decoder):
        self.decoder = decoder

    def __getattr__(self, name):
        return partial(self.call, getattr(self.decoder, name))

    def call(self, method, scores, *args, context=None, **rest):
        from simplexity import Context

        given = surroundings(scores)
        if self.decoder.name == "xtc":
            given = Context(seeds=scores.argmax(-1))  # without seeds its coin would fall anew at each call
        return method(scores, *args, context=given if context is None else replace(given, mask=context.mask), **rest)


def ready(spec: str) -> Any:
    """A decoder by its spec, which can be called with scores alone."""
    from simplexity import decoder

    made = decoder(spec)
    return Surrounded(made) if made.needs or made.name == "xtc" else made


@pytest.fixture(scope="session")
def smollm():
    """The embedded language model; tests that use it share one worker, and so one copy."""
    from simplexity.models import load_model

    return load_model()
