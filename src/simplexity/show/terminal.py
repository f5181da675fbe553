"""Tables and bars for a terminal of any width from 60 columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from simplexity.comparing import Compared
from simplexity.decoding import Decoder
from simplexity.explaining import Explained, Step
from simplexity.parameters import rule_of

EIGHTHS = " ▏▎▍▌▋▊▉"
TOKEN = 14


def bar(share: float, width: int) -> str:
    """A bar of share·width cells, to an eighth of a cell."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8]).ljust(width)[:width]


def token_label(text: str) -> str:
    """A token in at most TOKEN cells, with spaces and line breaks to be seen."""
    shown = repr(text)[1:-1].replace(" ", "·")
    return shown if len(shown) <= TOKEN else shown[: TOKEN - 1] + "…"


def show_step(step: Step, width: int) -> RenderableType:
    """Each decoder's block: the model's probabilities on the left, its own on the right, the certificate below."""
    length = max(8, min(28, (width - TOKEN - 22) // 2))
    key = Text(
        "τ: effective temperature, that of the plain softmax as sharp as q. ·: exactly zero. gap: what q misses of the "
        "best value of its objective. multiplier: the slope <q, g> all tokens with mass share at the optimum; active: "
        "how far any of them is from it, however small its mass; inactive: how far a token without mass exceeds it. "
        "bok stops after a few steps, so only solver=exact brings its gap to zero.",
        style="dim",
    )
    return Group(*(_block(step, answer, length) for answer in step.decoders), key)


def _block(step: Step, answer: Explained, length: int) -> RenderableType:
    d, c = answer.description, answer.certificate
    head = Text(answer.spec, style="bold")
    head.append(
        f"   entropy {abs(d.entropy.item()):.3f}  τ {number(d.effective_temperature.item())}  "
        f"tokens {d.support_size.item():,}",
        style="dim",
    )
    lines: list[RenderableType] = [head]
    shown_p = shown_q = 0.0
    for token, text in zip(step.ids, step.texts, strict=True):
        p, q = step.p[token].item(), answer.q[token].item()
        shown_p, shown_q = shown_p + p, shown_q + q
        lines.append(_bars(token_label(text), p, q, length))
    more = d.support_size.item() > (answer.q[step.ids] > 0).sum().item()
    rest_q = max(1e-9, 1 - shown_q) if more else 0.0
    lines.append(_bars("(all others)", max(0.0, 1 - shown_p), rest_q, length))
    lines.append(
        Text(
            f"  active {c.active_residual.item():.1e}  inactive {c.inactive_violation.item():.1e}  "
            f"multiplier {c.multiplier.item():.3f}  gap {c.gap.item():.1e}",
            style="dim",
        )
    )
    return Padding(Group(*lines), (0, 0, 1, 0))


def _bars(label: str, p: float, q: float, length: int) -> Text:
    line = Text(f"  {label:<{TOKEN}} ", no_wrap=True)
    line.append(bar(p, length), style="dim")
    line.append(f" {p:5.3f} ", style="dim")
    line.append("→ ", style="dim")
    line.append(bar(q, length), style="cyan")
    line.append(f" {q:5.3f}" if q > 0 else "     ·")
    return line


def show_comparison(results: Sequence[Compared], n: int) -> RenderableType:
    """The numbers as a table, then the texts."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("decoder", overflow="fold", min_width=16)
    for heading in ("tokens/s", "entropy", "τ", f"distinct\nof {n}", "left\nbest"):
        table.add_column(heading, justify="right", no_wrap=True)
    for r in results:
        tau = number(r.effective_temperature)
        table.add_row(r.spec, f"{r.speed:.1f}", f"{r.entropy:.3f}", tau, str(r.distinct), f"{100 * r.left_best:.0f}%")
    texts: list[RenderableType] = []
    for r in results:
        texts.append(Text(r.spec, style="bold"))
        texts += [Padding(Text(" ".join(t.split()) or "(nothing)"), (0, 0, 0, 2)) for t in dict.fromkeys(r.texts)][:2]
        if r.distinct > 2:
            texts.append(Text(f"  … and {r.distinct - 2} more", style="dim"))
        texts.append(Text(""))
    key = Text(
        "entropy: of q, in nats, mean over tokens. τ: effective temperature, that of the plain softmax as sharp as q. "
        "left best: how often the token was not the model's own best.",
        style="dim",
    )
    return Group(table, key, Text(""), *texts)


def list_decoders(known: dict[str, type[Decoder]]) -> RenderableType:
    """Every decoder with its parameters and objective."""
    lines: list[RenderableType] = []
    for name, kind in sorted(known.items()):
        own = [f for f in kind.parameters() if not f.kw_only]  # what every decoder takes is said once
        title = Text(name, style="bold")
        title.append("  " + ", ".join(f"{f.name}={default_text(f.default)}" for f in own), style="cyan")
        lines += [title, Padding(Text(kind.summary()), (0, 0, 0, 2))]
        lines.append(Padding(Text(kind.objective, style="dim"), (0, 0, 1, 2)))
    shared = "Every decoder also takes penalties, and one with a temperature a target in its place: see each alone."
    return Group(*lines, Text(shared, style="dim"))


def explain_decoder(kind: type[Decoder]) -> RenderableType:
    """One decoder: what it does, its objective, and each parameter."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in ("parameter", "default", "allowed", "meaning"):
        table.add_column(heading, overflow="fold")
    for f in kind.parameters():
        rule = rule_of(f)
        also = f" (also {', '.join(rule.aliases)})" if rule.aliases else ""
        table.add_row(f.name, default_text(f.default), rule.allowed, rule.doc + also)
    about = (kind.__doc__ or "").strip()
    about = "\n".join(line.strip() for line in about.splitlines())
    return Group(Text(kind.name, style="bold"), Text(about), Text(""), Text(kind.objective, style="cyan"), table)


def number(value: float) -> str:
    """A number in few cells; – where it is undefined."""
    if math.isnan(value):
        return "–"
    return "∞" if math.isinf(value) else f"{value:.2f}"


def default_text(value: object) -> str:
    """A parameter's default in words."""
    if value is None:
        return "–"
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def console(stderr: bool = False) -> Console:
    """Where to print; plain text where nobody looks."""
    return Console(stderr=stderr, highlight=False, soft_wrap=False)
