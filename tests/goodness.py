"""Whether tokens came from q."""

import torch
from scipy import stats


def chi_square(tokens, q) -> float:
    """The p-value of the hypothesis that `tokens` were drawn from q `[V]`; rare tokens are counted together."""
    counts = torch.bincount(torch.as_tensor(tokens), minlength=len(q)).double()
    expected = q.double() * len(tokens)
    assert counts[q == 0].sum() == 0, "a token off the support was drawn"
    common = expected >= 5
    seen = torch.cat([counts[common], counts[~common].sum().view(1)])
    hoped = torch.cat([expected[common], expected[~common].sum().view(1)])
    kept = hoped > 0.5
    return float(stats.chisquare(seen[kept], hoped[kept] * seen[kept].sum() / hoped[kept].sum()).pvalue)
