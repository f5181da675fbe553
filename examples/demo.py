"""Every decoder on the paper's three tokens, then on a recorded row of a real model's logits."""

import torch

from simplexity import decoder
from simplexity.recorded import recorded_rows

SPECS = ["greedy", "softmax", "top-k:k=2", "top-p:p=0.9", "sparsemax", "entmax", "kl", "bok", "bok:solver=exact"]
BARS = " ▏▎▍▌▋▊▉█"


def bar(q: float, width: int) -> str:
    """A bar of q·width cells, to an eighth of a cell."""
    eighths = round(q * width * 8)
    return ("█" * (eighths // 8) + BARS[eighths % 8]).ljust(width + 1)[: width + 1]


def three_tokens() -> None:
    """The paper's example: three tokens, three scores, one column of bars each."""
    scores = torch.tensor([3.0, 2.0, 0.0])
    print("Three tokens a, b, c with scores 3, 2, 0: which q maximises <q,s> − λ·Ω(q)?\n")
    print(f"{'decoder':17}{'a':14}{'b':14}{'c':14}{'entropy':>8}{'gap':>9}")
    for spec in SPECS:
        q, report = decoder(spec).distribution(scores), decoder(spec).describe(scores)
        cells = "".join(f"{p:5.3f} {bar(p, 6)} " for p in q.tolist())
        print(f"{spec:17}{cells[:42]}{abs(report.entropy):8.3f}{report.gap:9.1e}")


def real_row() -> None:
    """One step of a real model: what each decoder makes of it."""
    row = recorded_rows()[2]
    p = torch.softmax(row.scores, -1)
    print(f"\n{row.model} was asked {row.prompt!r}\nand has written {row.so_far!r}. What comes next?\n")
    top = list(row.tokens)[:5]
    print(f"{'decoder':24}" + "".join(f"{row.tokens[i].strip() or repr(row.tokens[i]):>8}" for i in top), end="")
    print(f"{'tokens':>8}{'τ':>7}")
    print(f"{'the model':24}" + "".join(f"{p[i]:8.3f}" for i in top))
    for spec in [*SPECS[1:], "bok:temperature=0.7", "softmax:entropy=0.5"]:
        q, report = decoder(spec).distribution(row.scores), decoder(spec).describe(row.scores)
        shown = "".join(f"{q[i]:8.3f}" if q[i] > 0 else f"{'·':>8}" for i in top)
        print(f"{spec:24}{shown}{report.support_size:8d}{report.effective_temperature:7.2f}")
    print("\nτ is the effective temperature: that of the plain softmax with the same entropy.")
    print("At the paper's settings bok is close to a softmax at τ = 0.2;")
    print("solver=exact is the optimum of its objective.")


if __name__ == "__main__":
    three_tokens()
    real_row()
