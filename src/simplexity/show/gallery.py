"""One figure of all decoders: what each does to three tokens, and to one step of a real model.

python -m simplexity.show.gallery docs/figures/decoders.png
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from simplexity.context import Context
from simplexity.decoders import decoder
from simplexity.decoding import Decoder
from simplexity.show.colours import colour
from simplexity.show.figures import FAINT, GREY, INK, figure, label, place, plain, save, triangle

SPECS = (
    "greedy", "softmax:temperature=0.6", "adaptive", "top-k:k=2", "top-p:p=0.7", "min-p:p=0.4", "epsilon:epsilon=0.15",
    "eta:epsilon=0.3", "top-n-sigma:n=1.2", "top-h:h=0.7", "typical:p=0.5", "xtc:probability=1,threshold=0.15",
    "sparsemax", "entmax", "kl:lam=2", "js:lam=2", "bok:solver=exact", "bok:weights=frontier,solver=exact,beta=8,lam=1",
    "tree-bok:beta=8",
    "guidance", "contrastive:alpha=0.2", "controlled", "capped:cap=0.5", "entropy-floor:h=0.9", "kl-ball:epsilon=0.2",
    {"decoder": "bounded", "groups": [[0, 1]], "upper": 0.5},
    {"decoder": "group-sparse", "groups": [[0, 1], [2]], "weight": 3.0},
)  # fmt: skip
"""Every decoder, at settings whose effect three tokens can show; ids in groups count from the likeliest token."""

CELLS = 7  # the simplex is covered by distributions whose probabilities are multiples of 1/CELLS, moved inside
PROMPT = "My favourite thing about the sea is the"
SHOWN = 7
TOGETHER = 8  # samples that share the text, for the decoder that counts them


Spec = str | dict[str, Any]


def gallery(specs: Sequence[Spec], scores: Tensor, texts: Sequence[str], context: Context, title: str) -> Figure:
    """Two panels a decoder: the map from p to q on the simplex of three tokens, and p and q of the row `scores` `[V]`.

    The row has its likeliest token first. `context` brings what some decoders need for it; on the simplex the other
    model prefers the first token, and the reward the second.
    """
    columns = 3
    lines = math.ceil(len(specs) / columns)
    made = figure(13.5, 0.9 + 2.15 * lines)
    made.suptitle(title, fontsize=11, color=INK)
    grid = made.subplots(lines, 2 * columns, squeeze=False, width_ratios=[1, 1.05] * columns)
    p, labels = torch.softmax(scores.double(), -1), [label(text) for text in texts[:SHOWN]]
    for number in range(lines * columns):
        left, right = grid[number // columns, 2 * (number % columns) : 2 * (number % columns) + 2]
        if number >= len(specs):
            left.set_axis_off()
            right.set_axis_off()
            continue
        chosen = decoder(specs[number])
        _map(left, chosen, colour(number))
        left.set_title(str(chosen), fontsize=8.5, loc="left", color=INK, family="monospace")
        q = chosen.distribution(scores.double(), context if _reads(chosen) else None)
        right.barh(range(SHOWN), p[:SHOWN].tolist(), color=FAINT, height=0.8)
        right.barh(range(SHOWN), q[:SHOWN].tolist(), color=colour(number), height=0.42)
        right.set_yticks(list(range(SHOWN)), labels, fontsize=7, family="monospace")
        right.set_ylim(SHOWN - 0.4, -0.6)
        right.set_xlim(0, 1)
        right.set_xticks([0, 0.5, 1], ["0", "½", "1"], fontsize=7)
        kept = int((q > 0).sum())
        right.annotate(
            f"{kept:,} token{'s' if kept > 1 else ''}",
            (0.98, 0.06),
            xycoords="axes fraction",
            ha="right",
            fontsize=7.5,
            color=GREY,
        )
        plain(right)
    return made


def _reads(chosen: Decoder) -> bool:
    """Whether a decoder is shown with what surrounds it: where it cannot do without, or counts its siblings."""
    return bool(chosen.needs) or chosen.reads("siblings")


def _map(axes: Any, chosen: Decoder, ink: str) -> None:
    """Lines from distributions p all over the simplex to the q that the decoder makes of them."""
    triangle(axes, ("a", "b", "c"), size=8)
    counts = [(i, j, CELLS - i - j) for i in range(CELLS + 1) for j in range(CELLS + 1 - i)]
    p = (torch.tensor(counts).double() + 0.25) / (CELLS + 0.75)
    p = p + torch.tensor([2e-3, 1e-3, 0.0]).double()  # no ties: where two tokens are equal, maps jump
    other, rewards = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])
    around = Context(siblings=torch.tensor(TOGETHER), other=other, rewards=rewards)
    q = chosen.distribution(p.log(), around if _reads(chosen) else None)
    for start, end in zip(p.tolist(), q.tolist(), strict=True):
        axes.plot(*zip(place(start), place(end), strict=True), color=ink, linewidth=0.7, alpha=0.55, zorder=2)
        axes.plot(*place(start), "o", color=GREY, markersize=1.6, zorder=3)
        axes.plot(*place(end), "o", color=ink, markersize=3.4, alpha=0.85, mec="white", mew=0.3, zorder=4)
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_xlim(-0.1, 1.1)
    axes.set_ylim(-0.16, 1.02)


def main(path: str) -> None:
    """Draw every decoder on a step of the embedded model; other: what it says to the last word alone."""
    from simplexity.models import load_model

    model = load_model()
    scores, order = model.next_scores(PROMPT, raw=True).sort(descending=True)
    texts = [model.tokenizer.decode([i]) for i in order.tolist()]
    rewards = torch.tensor([len(text.strip()) / 4 for text in texts])
    other = model.next_scores(PROMPT.split()[-1], raw=True)[order]
    around = Context(siblings=torch.tensor(TOGETHER), other=other, rewards=rewards)
    title = (
        "Left of each pair: three tokens, from the model's p (grey) to q.   "
        f"Right: “{PROMPT} …”, p in grey, q in colour, and how many tokens q keeps"
    )
    save(gallery(SPECS, scores, texts, around, title), Path(path))


if __name__ == "__main__":
    main(sys.argv[1])
