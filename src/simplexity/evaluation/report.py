"""Reports of runs: Markdown, one self-contained page and figures, in the layout of the paper's tables and ours."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from simplexity.decoders import decoder
from simplexity.evaluation.arms import Arm
from simplexity.evaluation.intervals import Interval
from simplexity.evaluation.presets import TABLES
from simplexity.evaluation.summary import Line, Summary, summarise
from simplexity.files import whole_file
from simplexity.show.colours import colour
from simplexity.show.figures import FAINT, GREY, INK, figure
from simplexity.show.page import STYLE

Rows = list[list[str]]


def write_report(folder: Path, out: Path) -> list[Path]:
    """Write report.md, report.html and a figure for each run found in the folder; their paths."""
    folders = [folder] if (folder / "plan.json").exists() else sorted(p.parent for p in folder.glob("*/plan.json"))
    if not folders:
        raise ValueError(f"{folder} holds no run: there is no plan.json in it")
    out.mkdir(parents=True, exist_ok=True)
    parts, pages, paths = [], [], []
    for run in folders:
        summary = summarise(run)
        name = f"{summary.plan.task}.png"
        drawn = frontier_figure(summary)
        sections = tables(summary)
        parts.append(_markdown(summary, sections, name if drawn is not None else None))
        image = b""
        if drawn is not None:
            buffer = io.BytesIO()
            drawn.savefig(buffer, format="png")
            image = buffer.getvalue()
            with whole_file(out / name) as draft:
                draft.write_bytes(image)
            paths.append(out / name)
        pages.append(_html(summary, sections, image))
    absent = not_run(folder, folders)
    for path, text in (
        (out / "report.md", "\n\n".join([*parts, *absent]) + "\n"),
        (out / "report.html", _page(pages, absent)),
    ):
        with whole_file(path) as draft:
            draft.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def not_run(folder: Path, folders: Sequence[Path]) -> list[str]:
    """What a table of the paper has and this folder has not."""
    if folders == [folder]:
        return []
    there = {path.name for path in folders}
    wanted = {name for table in TABLES.values() if there & set(table.tasks) for name in table.tasks}
    return [f"Not run: {name}." for name in sorted(wanted - there)]


def tables(summary: Summary) -> list[tuple[str, str, Rows]]:
    """(title, note, rows with their head) of every table that the run can fill."""
    made = (_by_temperature, _by_steps, _every_line, _coupled, _controls, _areas)
    return [table for table in (make(summary) for make in made) if table is not None]


def _by_temperature(summary: Summary) -> tuple[str, str, Rows] | None:
    """Tables 1 and 2 of the paper: methods down, temperatures across."""
    asked = [line for line in summary.lines if line.asked and line.temperature is not None]
    temperatures = sorted({line.temperature for line in asked if line.temperature is not None})
    if len(temperatures) < 2:
        return None
    rows = [["accuracy, %", *(f"τ = {t:g}" for t in temperatures)]]
    best = {t: max(line.accuracy.estimate for line in asked if line.temperature == t) for t in temperatures}
    for family in dict.fromkeys(line.family for line in asked):
        row = [_name(family)]
        for t in temperatures:
            found = next((line for line in asked if line.family == family and line.temperature == t), None)
            row.append("" if found is None else _bold(_percent(found.accuracy), found.accuracy.estimate == best[t]))
        rows.append(row)
    rows += _of_the_paper(summary)
    return "Accuracy by temperature", "The best of each column in bold; 95% intervals over questions.", rows


def _of_the_paper(summary: Summary) -> Rows:
    """What the paper prints for the same model and task."""
    for name, table in TABLES.items():
        if name != "table3" and summary.plan.model == table.model and summary.plan.task in table.paper:
            return [[f"paper: {method}", *map(str, row)] for method, row in table.paper[summary.plan.task].items()]
    return []


def _by_steps(summary: Summary) -> tuple[str, str, Rows] | None:
    """Table 3 of the paper: gradient steps across."""
    climbs: list[tuple[int, Line]] = []
    for line in summary.lines:
        made: Any = decoder(line.arm.decoder)
        if line.asked and made.name == "bok" and made.solver == "mirror":
            climbs.append((made.steps, line))
    climbs.sort(key=lambda pair: (pair[1].arm.coupled, pair[0]))
    if len({steps for steps, _ in climbs}) < 2:
        return None
    rows = [["gradient steps", *(f"{steps}{line.arm.suffix}" for steps, line in climbs)]]
    rows.append(["accuracy, %", *(_percent(line.accuracy) for _, line in climbs)])
    rows.append(["seconds a text", *(f"{line.seconds:.2g}" for _, line in climbs)])
    rows.append(["tokens a text", *(f"{line.tokens:.0f}" for _, line in climbs)])
    rows.append(["effective temperature", *(_number(line.effective_temperature) for _, line in climbs)])
    return "Steps of mirror ascent", "More steps are a lower temperature: see the last row.", rows


def _every_line(summary: Summary) -> tuple[str, str, Rows]:
    ks, sizes = summary.ks[1:], [size for size in summary.sizes if size > 1]
    head = ["decoder", "accuracy, %", *(f"pass@{k}" for k in ks)]
    head += [name for size in sizes for name in (f"maj@{size}", f"distinct@{size}")]
    head += ["entropy of q", "effective τ", "tokens", "cut off", "seconds"]
    rows = [head]
    for line in summary.lines:
        drawn = line.sampled
        row = [_name(line.arm) + ("" if line.asked else " (control)"), _percent(line.accuracy)]
        row += [f"{100 * drawn.pass_at(k).mean:.1f}" if drawn.has(k) else "–" for k in ks]
        for k in sizes:
            known = drawn.has(k)
            row += [f"{100 * drawn.majority_at(k).mean:.1f}", f"{drawn.distinct(k).mean:.2f}"] if known else ["–", "–"]
        row += [f"{line.entropy:.3f}", _sharpness(summary, line), f"{line.tokens:.0f}", f"{line.cut:.0%}"]
        rows.append([*row, f"{line.seconds:.2g}"])
    note = (
        "The effective temperature is that of the softmax with the same entropy, mean over texts by their length; "
        "with ≈ that of the softmax with the same mean entropy, read off the sweep."
    )
    if any(line.arm.coupled > 1 for line in summary.lines):
        note += (
            " Coupled samples are scored in the groups they were drawn in, and in every second, every fourth … of a "
            "group, which are groups of their own, unless samples look at who is with them (–: not defined)."
        )
    return "Every decoder", note, rows


def _coupled(summary: Summary) -> tuple[str, str, Rows] | None:
    rows = [["decoder", "k", "pass@k", "maj@k", "distinct@k"]]
    for line, k in product(summary.lines, summary.ks):
        found = summary.against_independent(line, k)
        if found is not None:
            chances = [f"{_percent(difference, sign=True)}{_told(difference)}" for difference in found[:2]]
            distinct = f"{_interval(found[2], '+.2f')}{_told(found[2])}"
            rows.append([f"`{line.arm.decoder}`", str(k), *chances, distinct])
    if len(rows) == 1:
        return None
    note = (
        "Groups of exactly k coupled samples minus k independent ones of the same decoder, in points and answers. "
        "Paired over questions, 95%."
    )
    return "Coupled against independent samples", note, rows


def _controls(summary: Summary) -> tuple[str, str, Rows] | None:
    rows = [["decoder", "effective τ", "control", "accuracy minus the control's"]]
    for line in summary.lines:
        found = summary.against_control(line)
        if found is not None:
            difference = f"{_percent(found[1], sign=True)}{_told(found[1])}"
            rows.append([_name(line.arm), _sharpness(summary, line), found[0], difference])
    if len(rows) == 1:
        return None
    note = (
        "A decoder that sharpens is held against a plain softmax that is as sharp on average: what is left is what it "
        "does beyond lowering the temperature. Paired over questions, 95%."
    )
    return "Against a matched temperature", note, rows


def _areas(summary: Summary) -> tuple[str, str, Rows] | None:
    ks = [k for k in summary.ks if k > 1]
    rows = [["family", *(f"pass@{k} at equal pass@1" for k in ks)]]
    for family in summary.families:
        found = [summary.area(family, k) for k in ks]
        if any(found):
            rows.append([_name(family), *("–" if a is None else _percent(a, sign=True) for a in found)])
    if len(rows) == 1:
        return None
    base = "softmax" if 1 in summary.plan.coupled else "softmax coupled alike"
    note = (
        "The frontier of a family: the most pass@k it reaches with a pass@1 of at least so much, as its knob turns. "
        f"Here its mean height above that of {base}, in points, over the pass@1 that both have settings for. Paired "
        "over questions, 95%."
    )
    return "Frontiers", note, rows


def frontier_figure(summary: Summary) -> Any:
    """pass@1 against pass@k, a panel for each size k of a set, in it a curve for each family; None where n is 1."""
    if summary.plan.n < 2:
        return None
    rows = -(-len(summary.families) // (2 * len(summary.sizes)))
    made = figure(7.5 * len(summary.sizes), 4.8 + 0.2 * rows)
    panels = made.subplots(1, len(summary.sizes), squeeze=False)[0]
    for axes, k in zip(panels, summary.sizes, strict=True):
        _frontiers(axes, summary, k)
    named = {name: line for axes in panels for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    # below the panels: there is no room beside a dozen curves
    columns = 2 * len(summary.sizes)
    made.legend(named.values(), named, loc="outside lower left", ncols=columns, fontsize=8, frameon=False)
    return made


def _frontiers(axes: Any, summary: Summary, k: int) -> None:
    decoders = list(dict.fromkeys(family.decoder for family in summary.families))
    for family, lines in summary.families.items():
        if not lines[0].sampled.has(k):
            continue
        lines = sorted(lines, key=lambda line: line.knob or 0.0)
        x, y = ([100 * line.sampled.pass_at(size).mean for line in lines] for size in (1, k))
        chosen = colour(decoders.index(family.decoder))
        # one colour a decoder: hollow and dashed where its samples are coupled
        style, inside = ("o-", chosen) if family.coupled == 1 else ("o--", "white")
        axes.plot(x, y, style, color=chosen, markerfacecolor=inside, label=str(family), markersize=5, linewidth=1.2)
        for line, *spot in (list(zip(lines, x, y, strict=True))[place] for place in {0, len(lines) - 1}):
            told = "" if line.knob is None else f"{line.knob:g}"  # of both ends: more would overlap
            axes.annotate(told, spot, textcoords="offset points", xytext=(5, -9), fontsize=7, color=GREY)
    axes.set_xlabel("pass@1, %", color=INK)
    axes.set_ylabel(f"pass@{k}, %", color=INK)
    axes.set_title(f"{summary.plan.task}: each decoder's own knob swept", fontsize=10, color=INK, loc="left")
    axes.grid(color=FAINT, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _axes(summary: Summary) -> str:
    """What the figure shows, in words."""
    return f"pass@1 against {' and '.join(f'pass@{k}' for k in summary.sizes)}"


def _about(summary: Summary) -> str:
    plan, about = summary.plan, summary.about
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    model = plan.model or "the embedded model"
    ways = ["independent" if size == 1 else f"coupled in groups of {size}" for size in plan.coupled]
    drawn = "" if plan.coupled == (1,) else f"{' or '.join(ways)}, "
    said = (
        f"{model}, {summary.questions} questions, {plan.n} samples each, {drawn}seed {plan.seed}, at most "
        f"{plan.max_new_tokens} tokens; {about['machine']}, {about['date']}, {versions}."
    )
    return said + (f" Not finished yet: {', '.join(map(str, summary.missing))}." if summary.missing else "")


def _markdown(summary: Summary, sections: Sequence[tuple[str, str, Rows]], image: str | None) -> str:
    parts = [f"# {summary.plan.task}", _about(summary)]
    for title, note, rows in sections:
        head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
        lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in body]
        parts += [f"## {title}", note, "\n".join(lines)]
    if image is not None:
        parts.append(f"![{_axes(summary)}]({image})")
    return "\n\n".join(parts)


def _html(summary: Summary, sections: Sequence[tuple[str, str, Rows]], image: bytes) -> str:
    parts = [f"<h1>{html.escape(summary.plan.task)}</h1>", f'<p class="about">{html.escape(_about(summary))}</p>']
    for title, note, rows in sections:
        head = "".join(f"<th>{_cell(cell)}</th>" for cell in rows[0])
        body = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
        parts.append(
            f'<h2>{html.escape(title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
            f'<tbody>{body}</tbody></table></div><p class="note">{html.escape(note)}</p>'
        )
    if image:
        data = base64.b64encode(image).decode()
        parts.append(
            f'<p><img alt="{_axes(summary)}" style="max-width:min(100%, 46rem)" src="data:image/png;base64,{data}"></p>'
        )
    return "\n".join(parts)


def _page(pages: Sequence[str], absent: Sequence[str]) -> str:
    body = "\n".join([*pages, *(f'<p class="about">{html.escape(line)}</p>' for line in absent)])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Evaluation</title><style>{STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _cell(text: str) -> str:
    """A cell of Markdown as HTML: code and bold are all there is."""
    escaped = html.escape(text)
    for mark, tag in (("**", "b"), ("`", "code")):
        while escaped.count(mark) >= 2:
            escaped = escaped.replace(mark, f"<{tag}>", 1).replace(mark, f"</{tag}>", 1)
    return escaped


def _percent(value: Interval, sign: bool = False) -> str:
    return _interval(value, "+.1f" if sign else ".1f", 100)


def _interval(value: Interval, form: str, scale: int = 1) -> str:
    if not math.isfinite(value.low) or not math.isfinite(value.high):
        return f"{scale * value.estimate:{form}} (no interval: one question)"
    ends = f"[{scale * value.low:{form}}, {scale * value.high:{form}}]"
    return f"{scale * value.estimate:{form}} {ends}"


def _told(difference: Interval) -> str:
    return ", beyond chance" if difference.low > 0 or difference.high < 0 else ""


def _sharpness(summary: Summary, line: Line) -> str:
    if line.effective_temperature is not None:
        return _number(line.effective_temperature)
    tau = line.temperature if line.family.decoder == "softmax" else summary.as_sharp(line)
    return "–" if tau is None else f"≈ {tau:.3f}"


def _name(arm: Arm) -> str:
    return f"`{arm.decoder}`{arm.suffix}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _bold(text: str, yes: bool) -> str:
    return f"**{text}**" if yes else text
