"""Figures: one step under every decoder, the three-token simplex, and a comparison of texts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from simplexity.comparing import Compared
from simplexity.explaining import Step
from simplexity.files import whole_file
from simplexity.show.colours import colour

INK, GREY, FAINT = "#1f2430", "#8a919e", "#d5d9e0"


def figure(width: float, height: float) -> Figure:
    """An empty figure in the house style, free of any window system."""
    mpl.rcParams.update({"svg.fonttype": "none"})
    made = Figure(figsize=(width, height), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(made)
    return made


def save(made: Figure, path: Path) -> None:
    """Write the figure, whole or not at all; the suffix, one of `FORMATS`, chooses how."""
    with whole_file(path) as draft, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a box stands for it, and the text is elsewhere
        made.savefig(draft)


def explain_figure(step: Step, title: str) -> Figure:
    """One panel a decoder: the model's p in grey, q in colour, for the tokens that matter."""
    columns = min(3, len(step.decoders))
    lines = math.ceil(len(step.decoders) / columns)
    made = figure(4.0 * columns, 0.9 + (0.7 + 0.23 * len(step.ids)) * lines)
    made.suptitle(title, fontsize=11, color=INK)
    grid = made.subplots(lines, columns, squeeze=False, sharey=True)
    places = range(len(step.ids))
    for number, axes in enumerate(grid.flat):
        if number >= len(step.decoders):
            axes.set_axis_off()
            continue
        answer = step.decoders[number]
        axes.barh(places, step.p[step.ids].tolist(), color=FAINT, height=0.8)
        axes.barh(places, answer.q[step.ids].tolist(), color=colour(number), height=0.45)
        axes.set_yticks(list(places), [label(t) for t in step.texts], fontsize=8, family="monospace")
        axes.set_ylim(len(step.ids) - 0.4, -0.6)
        axes.set_xlim(0, 1)
        tau = answer.description.effective_temperature.item()
        axes.set_title(answer.spec, fontsize=9, loc="left", color=INK, family="monospace")
        axes.set_xlabel(
            f"H {abs(answer.description.entropy.item()):.2f}   τ {tau:.2f}   "
            f"tokens {answer.description.support_size.item():,}   gap {answer.certificate.gap.item():.0e}",
            fontsize=7.5,
            color=GREY,
        )
        plain(axes)
    return made


def simplex_figure(
    points: Sequence[tuple[str, Tensor]], paths: Sequence[tuple[str, Tensor]], names: Sequence[str], title: str
) -> Figure:
    """The triangle of all distributions over three tokens: each decoder's point, and mirror ascent on its way.

    Beside it the part where they all are, enlarged.
    """
    made = figure(11, 5.6)
    made.suptitle(title, fontsize=11, color=INK)
    whole, part = made.subplots(1, 2)
    places = [place(q.tolist()) for _, q in points] + [place(q) for _, path in paths for q in path.tolist()]
    for axes in (whole, part):
        triangle(axes, names)
        _decoders(axes, points, paths)
        axes.set_aspect("equal")
        axes.set_axis_off()
    whole.set_xlim(-0.08, 1.08)
    whole.set_ylim(-0.1, 0.98)
    (left, right), (low, high) = ((min(v), max(v)) for v in zip(*places, strict=True))
    reach = 0.6 * max(right - left, high - low, 0.05)
    x, y = (left + right) / 2, (low + high) / 2
    part.set_xlim(x - reach, x + reach)
    part.set_ylim(max(y - reach, -0.06), max(y - reach, -0.06) + 2 * reach)
    frame = {"fill": False, "edgecolor": GREY, "linewidth": 0.8, "linestyle": ":"}
    whole.add_patch(Rectangle((x - reach, max(y - reach, -0.06)), 2 * reach, 2 * reach, **frame))
    handles, labels = whole.get_legend_handles_labels()
    made.legend(
        [Line2D([], [], marker="o", linestyle="", color=handle.get_color()) for handle in handles],
        labels,
        loc="outside lower center",
        ncols=4,
        frameon=False,
        prop={"family": "monospace", "size": 8},
    )
    return made


def triangle(axes: Any, names: Sequence[str], size: float = 12) -> None:
    """The simplex of three tokens with lines at quarters, and the tokens' names at its corners."""
    corners = [(0.0, 0.0), (1.0, 0.0), (0.5, math.sqrt(3) / 2)]
    axes.fill(*zip(*corners, strict=True), facecolor="#f6f7f9", edgecolor=GREY, linewidth=1.2)
    for share in (0.25, 0.5, 0.75):
        for i in range(3):
            a, b = [0.0] * 3, [0.0] * 3
            a[i] = b[i] = share
            a[(i + 1) % 3] = b[(i + 2) % 3] = 1 - share
            axes.plot(*zip(place(a), place(b), strict=True), color=FAINT, linewidth=0.7, zorder=1)
    for name, corner, (right, up) in zip(names, corners, [(-1, -1.2), (1, -1.2), (0, 0.65)], strict=True):
        axes.annotate(
            name,
            corner,
            textcoords="offset points",
            xytext=(right * size, up * size),
            ha="center",
            fontsize=size,
            color=INK,
            weight="bold",
            annotation_clip=True,
        )


def _decoders(axes: Any, points: Sequence[tuple[str, Tensor]], paths: Sequence[tuple[str, Tensor]]) -> None:
    number = {name: i for i, (name, _) in enumerate(points)}
    for name, path in paths:
        xs, ys = zip(*(place(q) for q in path.tolist()), strict=True)
        axes.plot(xs, ys, "-", color=colour(number.get(name, 0)), linewidth=1.2, alpha=0.8, zorder=2)
        axes.plot(xs[:-1], ys[:-1], "o", color=colour(number.get(name, 0)), markersize=3, zorder=3)
    for i, (name, q) in enumerate(points):
        x, y = place(q.tolist())
        # decoders may agree: larger discs below let every one of them be seen
        size = 17 - 13 * i / max(1, len(points) - 1)
        axes.plot([x], [y], "o", markersize=size, color=colour(i), mec="white", mew=0.4, label=name, zorder=4 + i)


def compare_figure(results: Sequence[Compared], title: str) -> Figure:
    """Entropy along the text, and effective temperature, one colour a decoder."""
    made = figure(10, 1.4 + 0.42 * max(6, len(results)))
    made.suptitle(title, fontsize=11, color=INK)
    left, right = made.subplots(1, 2, width_ratios=[3, 2])
    for i, result in enumerate(results):
        smooth = _smooth(result.entropies)
        left.plot(range(1, len(smooth) + 1), smooth, color=colour(i), linewidth=1.6, label=result.spec)
    left.set_xlabel("token", fontsize=9, color=GREY)
    left.set_ylabel("entropy of q (nats, mean of 5 tokens)", fontsize=9, color=GREY)
    left.set_ylim(0, 1.35 * left.get_ylim()[1])  # room for the names above the lines
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.legend(fontsize=7, frameon=False, prop={"family": "monospace", "size": 7}, loc="upper left", ncols=2)
    places = range(len(results))
    taus = [0.0 if math.isnan(r.effective_temperature) else r.effective_temperature for r in results]
    right.barh(places, taus, color=[colour(i) for i in places], height=0.6)
    for i, tau in enumerate(taus):
        right.annotate(
            f"{tau:.2f}", (tau, i), textcoords="offset points", xytext=(4, 0), va="center", fontsize=8, color=INK
        )
    right.set_yticks(list(places), [r.spec for r in results], fontsize=8, family="monospace")
    right.invert_yaxis()
    right.set_xlabel("effective temperature", fontsize=9, color=GREY)
    right.margins(x=0.15)
    for axes in (left, right):
        plain(axes)
    return made


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    return [
        sum(values[max(0, i - width + 1) : i + 1]) / len(values[max(0, i - width + 1) : i + 1])
        for i in range(len(values))
    ]


def place(q: Sequence[float]) -> tuple[float, float]:
    """Where a distribution over three tokens lies in the drawing: the first token at the lower left."""
    return q[1] + q[2] / 2, q[2] * math.sqrt(3) / 2


def label(text: str) -> str:
    """A token in at most twelve letters, with spaces and line breaks to be seen."""
    shown = repr(text)[1:-1]
    shown = shown if len(shown) <= 12 else shown[:11] + "…"
    return shown.replace("$", r"\$").replace(" ", "·")


def plain(axes: Any) -> None:
    """Axes with as little ink as possible."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=GREY, labelsize=8, length=2)
