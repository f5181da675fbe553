import os

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


@pytest.fixture(scope="session")
def smollm():
    """The embedded language model; tests that use it share one worker, and so one copy."""
    from simplexity.models import load_model

    return load_model()
