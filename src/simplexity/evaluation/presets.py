"""The paper's tables as run plans (Ji, Tutunov, Zimmer and Bou-Ammar, 2026, tables 1 to 3).

The paper leaves open K, the weights and the step of Best-of-K; here they are the decoder's own: K = 8, weights = the
model's probabilities, step = 1. Its accuracies come from one sample a question; n more give intervals and pass@k.
"""

from __future__ import annotations

from dataclasses import dataclass

from simplexity.evaluation.plan import at_temperatures

TEMPERATURES = (0.1, 0.25, 0.5, 0.7, 0.9)
SETTINGS = ((0.01, 0.1), (0.02, 0.2), (0.05, 0.5))  # β, λ
STEPS = (2, 5, 10, 15, 20)


@dataclass(frozen=True)
class Table:
    """A model, tasks and decoders; `paper` holds the accuracies printed there, in per cent, by task and method."""

    title: str
    model: str
    tasks: tuple[str, ...]
    decoders: tuple[str, ...]
    paper: dict[str, dict[str, tuple[float, ...]]]


METHODS = {
    "Base": "softmax",
    "Top-K": "top-k:k=50",
    **{f"BoK β={beta}, λ={lam}": f"bok:beta={beta},lam={lam}" for beta, lam in SETTINGS},
}
GRID = tuple(at_temperatures(list(METHODS.values()), TEMPERATURES))


def _columns(*rows: tuple[float, ...]) -> dict[str, tuple[float, ...]]:
    return dict(zip(METHODS, rows, strict=True))


TABLES = {
    "table1": Table(
        "Accuracy by temperature, Qwen2.5-Math-7B",
        "Qwen/Qwen2.5-Math-7B",
        ("math500", "gpqa-diamond", "humaneval"),
        GRID,
        {
            "math500": _columns(
                (72.2, 72.6, 69.4, 64.4, 53.0), (72.8, 73.4, 69.4, 65.0, 56.2), (74.2, 72.8, 71.0, 73.0, 71.2),
                (72.6, 71.8, 72.2, 72.4, 71.6), (72.8, 71.6, 72.8, 72.8, 70.8),
            ),
            "gpqa-diamond": _columns(
                (32.32, 33.84, 26.26, 31.31, 30.30), (33.84, 35.35, 28.79, 31.31, 31.82),
                (30.81, 33.84, 31.82, 33.33, 36.36), (31.31, 36.36, 33.33, 34.85, 31.82),
                (33.84, 32.83, 35.35, 31.82, 31.82),
            ),
            "humaneval": _columns(
                (56.71, 53.05, 48.78, 49.39, 32.93), (54.88, 51.83, 51.83, 46.34, 37.80),
                (54.27, 54.88, 50.0, 54.27, 52.44), (54.88, 54.88, 51.83, 53.05, 52.44),
                (56.01, 51.83, 51.83, 52.44, 51.22),
            ),
        },
    ),
    "table2": Table(
        "Accuracy by temperature, Qwen2.5-7B",
        "Qwen/Qwen2.5-7B",
        ("math500", "gpqa-diamond", "humaneval"),
        GRID,
        {
            "math500": _columns(
                (57.6, 60.4, 56.6, 50.2, 44.2), (59.1, 59.4, 52.8, 51.6, 41.0), (57.6, 59.6, 60.6, 60.0, 58.0),
                (58.8, 59.2, 61.8, 60.4, 60.2), (59.1, 61.0, 59.4, 59.4, 59.4),
            ),
            "gpqa-diamond": _columns(
                (32.83, 27.78, 21.72, 25.76, 24.24), (28.28, 29.80, 27.78, 29.80, 32.32),
                (31.82, 29.80, 29.80, 29.29, 32.32), (31.82, 29.29, 30.30, 27.78, 29.29),
                (30.30, 30.30, 29.80, 29.29, 24.24),
            ),
            "humaneval": _columns(
                (70.13, 67.68, 71.34, 71.95, 45.12), (71.95, 70.73, 71.95, 65.24, 57.93),
                (72.56, 71.95, 71.95, 72.56, 71.34), (71.59, 73.17, 74.78, 71.51, 69.51),
                (72.56, 72.56, 69.51, 69.51, 66.46),
            ),
        },
    ),
    "table3": Table(
        "Accuracy and runtime by gradient steps, Qwen2.5-Math-7B, τ = 0.7, β = 0.01, λ = 0.1",
        "Qwen/Qwen2.5-Math-7B",
        ("math500",),
        ("softmax:temperature=0.7", *(f"bok:temperature=0.7,steps={steps}" for steps in STEPS)),
        {
            "math500": {
                "accuracy": (64.4, 69.6, 73.0, 71.6, 71.2, 72.8),
                "seconds": (15.84, 15.87, 16.88, 17.70, 17.91, 18.26),
            }
        },
    ),
}  # fmt: skip
