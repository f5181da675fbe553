"""The chart of the committed benchmark results: python benchmarks/chart.py docs/figures/speed.png"""

import argparse
import json
from pathlib import Path
from typing import Any

from simplexity.show.colours import PALETTE
from simplexity.show.figures import FAINT, GREY, INK, figure, save

RESULTS = Path(__file__).parent / "results"
SIZE = 151_936


def rows(file: str, batch: int) -> tuple[str, dict[str, float]]:
    """(machine and date, µs of each contender) at one batch size, float32, peaked logits."""
    about = json.loads((RESULTS / file).read_text())
    for result in about["results"]:
        case = (result["shape"], result["vocabulary"], result["batch"], result["dtype"])
        if case == ("peaked", SIZE, batch, "float32"):
            us = result.get("us") or {name: row["us"] for name, row in result["rows"].items()}
            return f"{about['machine']} ({about['date']})", us
    raise ValueError(f"{file} has no result for {SIZE} tokens, batch {batch}")


def colour_of(name: str) -> str:
    """Ours in colour, Best-of-K in another, everyone else in grey."""
    if "amax" in name or "chain" in name or "torch" in name or "FlashInfer" in name:
        return FAINT
    return PALETTE[5] if name.startswith("bok") else PALETTE[1]


def label(name: str) -> str:
    """The decoder without what all have in common."""
    name = name.replace("temperature=0.8,", "").replace(",temperature=0.8", "").replace(":temperature=0.8", "")
    return name.replace("chain ", "transformers, ")


def panel(axes: Any, title: str, us: dict[str, float]) -> None:
    """Bars from the slowest to the fastest."""
    names = sorted(us, key=lambda name: -us[name])
    colours, widths = [colour_of(name) for name in names], [us[name] for name in names]
    axes.barh([label(name) for name in names], widths, color=colours, height=0.7)
    for place, name in enumerate(names):
        axes.text(us[name] * 1.06, place, f"{us[name]:,.0f}", va="center", fontsize=7, color=INK)
    axes.set_xscale("log")
    axes.set_xlim(min(us.values()) / 2, max(us.values()) * 4)
    axes.set_title(title, fontsize=9, color=INK, loc="left")
    axes.tick_params(labelsize=7, colors=INK)
    axes.set_xlabel("µs from logits to token", fontsize=8, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """A GPU above, a CPU below, at two batch sizes each."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("out", type=Path)
    panels = [("h200.json", 1), ("h200.json", 256), ("cpu-2-cores.json", 1), ("cpu-2-cores.json", 32)]
    made = figure(11, 7.4)
    for axes, (file, batch) in zip(made.subplots(2, 2).flat, panels, strict=True):
        machine, us = rows(file, batch)
        panel(axes, f"batch {batch}, {machine}", us)
    made.suptitle(f"From {SIZE:,} float32 logits to a token; other people's in grey", fontsize=11, color=INK)
    save(made, options.parse_args().out)


if __name__ == "__main__":
    main()
