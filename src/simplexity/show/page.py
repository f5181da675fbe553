"""A comparison as one self-contained HTML page: numbers, charts, every text. No script, nothing fetched."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from datetime import date

from simplexity.comparing import Compared
from simplexity.explaining import Step
from simplexity.show.colours import colour
from simplexity.show.terminal import number

STYLE = """
:root { --ink: #1f2430; --soft: #626a78; --line: #dfe3e9; --paper: #ffffff; --card: #f6f7f9; --ghost: #cdd2da }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa3b2; --line: #333a46; --paper: #14171c;
  --card: #1c2027; --ghost: #3a4250 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 68rem; padding: 2rem 1.2rem 4rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 0 .3rem } h2 { font-size: 1.1rem; margin: 2.4rem 0 .8rem }
p.about { color: var(--soft); margin: .2rem 0 } code, .spec { font-family: ui-monospace, monospace; font-size: .86em }
blockquote { margin: 1rem 0; padding: .6rem 1rem; border-left: 4px solid var(--ghost); background: var(--card);
  white-space: pre-wrap; overflow-wrap: anywhere }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--soft); font-weight: 500; font-size: .85rem; vertical-align: bottom }
th:first-child, td:first-child { text-align: left }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .5em;
  border: 1px solid var(--line) }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)) }
.card { background: var(--card); border-radius: .5rem; padding: .8rem 1rem; min-width: 0 }
.card h3 { margin: 0 0 .5rem; font-size: .95rem; overflow-wrap: anywhere }
.row { display: grid; grid-template-columns: 6.5rem 1fr 3rem; gap: .5rem; align-items: center; font-size: .8rem }
.row > span:first-child { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; text-align: right }
.track { position: relative; height: .95rem } .track i { position: absolute; left: 0; top: 0; height: 100%;
  background: var(--ghost); border-radius: 2px } .track b { position: absolute; left: 0; top: 25%; height: 50%;
  border-radius: 2px; outline: 1px solid var(--card) }
.row > span:last-child { color: var(--soft); text-align: right; font-variant-numeric: tabular-nums }
.note { color: var(--soft); font-size: .8rem; margin: .4rem 0 0 }
.text { white-space: pre-wrap; overflow-wrap: anywhere; border-top: 1px solid var(--line); padding: .5rem 0;
  font-size: .9rem } .text:first-of-type { border-top: 0 }
svg { width: 100%; min-width: 34rem; height: auto; display: block } svg text { fill: var(--soft); font-size: 12px }
"""


def compare_page(results: Sequence[Compared], step: Step, prompt: str, model: str, n: int, seed: int) -> str:
    """The page as text."""
    esc = html.escape
    rows = "\n".join(_table_row(i, r) for i, r in enumerate(results))
    cards = "\n".join(_step_card(i, step, i) for i in range(len(step.decoders)))
    texts = "\n".join(_text_card(i, r) for i, r in enumerate(results))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{len(results)} decoders on one prompt</title><style>{STYLE}</style></head><body>
<h1>{len(results)} decoders on one prompt</h1>
<p class="about">{esc(model)} · {n} samples each · seed {seed} · {date.today().isoformat()} · simplexity</p>
<blockquote>{esc(prompt)}</blockquote>
<h2>What each did, on average over its tokens</h2>
<div class="scroll"><table><thead><tr><th>decoder</th><th>tokens/s</th><th>entropy of q<br>(nats)</th>
<th>effective<br>temperature</th><th>distinct<br>of {n}</th><th>left the<br>best token</th></tr></thead>
<tbody>{rows}</tbody></table></div>
<p class="note">The effective temperature is that of the plain softmax with the same entropy: two decoders with the same
one are about as sharp, whatever their names.</p>
<h2>The first token: before (grey) and after (colour)</h2>
<div class="grid">{cards}</div>
<h2>Entropy of q along the text</h2>
<div class="card scroll">{_entropy_chart(results)}</div>
<p class="note">{_legend(results)}</p>
<p class="note">Mean over the samples still being written, smoothed over five tokens.</p>
<h2>The texts</h2>
<div class="grid">{texts}</div>
</body></html>
"""


def _table_row(i: int, r: Compared) -> str:
    return (
        f'<tr><td><span class="dot" style="background:{colour(i)}"></span>'
        f'<span class="spec">{html.escape(r.spec)}</span></td>'
        f"<td>{r.speed:.1f}</td><td>{r.entropy:.3f}</td><td>{number(r.effective_temperature)}</td>"
        f"<td>{r.distinct}</td><td>{100 * r.left_best:.0f}%</td></tr>"
    )


def _step_card(i: int, step: Step, at: int) -> str:
    answer = step.decoders[at]
    bars = ""
    for token, text in zip(step.ids, step.texts, strict=True):
        p, q = step.p[token].item(), answer.q[token].item()
        label = html.escape(repr(text)[1:-1].replace(" ", "·"))
        bars += (
            f'<div class="row"><span class="spec" title="{label}">{label}</span><span class="track">'
            f'<i style="width:{100 * p:.2f}%"></i><b style="width:{100 * q:.2f}%;background:{colour(i)}"></b></span>'
            f"<span>{q:.3f}</span></div>"
        )
    d, c = answer.description, answer.certificate
    note = (
        f"entropy {abs(d.entropy.item()):.2f} · τ {number(d.effective_temperature.item())} · "
        f"{_tokens(int(d.support_size.item()))} · gap&nbsp;{c.gap.item():.0e}"
    )
    title = html.escape(answer.spec)
    return f'<div class="card"><h3 class="spec">{title}</h3>{bars}<p class="note">{note}</p></div>'


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count:,} tokens"


def _text_card(i: int, r: Compared) -> str:
    counts: dict[str, int] = {}
    for text in r.texts:
        counts[text] = counts.get(text, 0) + 1
    body = "".join(
        f'<div class="text">{html.escape(text.strip()) or "<em>nothing</em>"}'
        + (f' <span class="note">({count} times)</span>' if count > 1 else "")
        + "</div>"
        for text, count in counts.items()
    )
    dot = f'<span class="dot" style="background:{colour(i)}"></span>'
    return f'<div class="card"><h3 class="spec">{dot}{html.escape(r.spec)}</h3>{body}</div>'


def _entropy_chart(results: Sequence[Compared]) -> str:
    wide, high, left, bottom, top = 900, 300, 44, 34, 10
    longest = max(len(r.entropies) for r in results)
    most = max([0.1, *(max(_smooth(r.entropies), default=0.0) for r in results)])
    unit = 10 ** math.floor(math.log10(most))
    unit = next(u for u in (unit / 5, unit / 2, unit, 2 * unit) if most / u <= 6)
    ceiling = unit * math.ceil(most / unit)

    def x(step: float) -> float:
        return left + (wide - left - 10) * step / max(1, longest - 1)

    def y(value: float) -> float:
        return top + (high - top - bottom) * (1 - value / ceiling)

    marks = ""
    for j in range(round(ceiling / unit) + 1):
        at = y(j * unit)
        marks += f'<line x1="{left}" x2="{wide - 10}" y1="{at:.1f}" y2="{at:.1f}" stroke="var(--line)"/>'
        marks += f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{j * unit:.3g}</text>'
    for share in (0, 0.25, 0.5, 0.75, 1):
        step = round(share * (longest - 1))
        marks += f'<text x="{x(step):.1f}" y="{high - 12}" text-anchor="middle">{step + 1}</text>'
    lines = ""
    for i, r in enumerate(results):
        points = " ".join(f"{x(j):.1f},{y(v):.1f}" for j, v in enumerate(_smooth(r.entropies)))
        lines += f'<polyline points="{points}" fill="none" stroke="{colour(i)}" stroke-width="2">'
        lines += f"<title>{html.escape(r.spec)}</title></polyline>"
    return f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="entropy by token">{marks}{lines}</svg>'


def _legend(results: Sequence[Compared]) -> str:
    dots = (
        f'<span class="dot" style="background:{colour(i)}"></span><span class="spec">{html.escape(r.spec)}</span>'
        for i, r in enumerate(results)
    )
    return " &nbsp; ".join(dots)


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    windows = [values[max(0, i - width + 1) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
