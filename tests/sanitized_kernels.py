"""Runs every Triton kernel once on awkward rows, to be watched by compute-sanitizer: `make sanitize`.

    compute-sanitizer --tool memcheck python tests/sanitized_kernels.py [part/parts]

It slows kernels down a hundredfold, so parts may run side by side; part 1/4 does every fourth of what is to be done.
"""

import sys
from collections.abc import Callable, Iterator
from itertools import islice

import torch

from simplexity import Codes, Context, decoder
from simplexity.kernels import gpu, gpu_codes
from simplexity.kernels.gpu_attention import attention
from simplexity.kernels.gpu_moments import MomentsOnGPU
from simplexity.siblings import Siblings
from test_kernels_gpu import DEVICE, SPECS, awkward, plan_for, plan_of

SIZES = (111, 32_003) if DEVICE == "cuda" else (111,)


def runs() -> Iterator[tuple[str, Callable[[], object]]]:
    """What to call, with a name for it."""
    for size in SIZES:
        x, seeds = awkward(size).to(DEVICE), torch.arange(7, device=DEVICE)
        u = torch.rand(7, dtype=torch.float64, device=DEVICE)
        for spec in SPECS:
            plan = plan_of(spec)
            yield f"{spec} {size}", lambda x=x, plan=plan, seeds=seeds: gpu.fused_draw(x, plan, seeds, 3)
            yield f"{spec} {size} coupled", lambda x=x, plan=plan, u=u: gpu.fused_draw(x, plan, uniforms=u, places=True)
            yield f"{spec} {size} written", lambda x=x, plan=plan: gpu.fused_distribution(x, plan, log=True)
        for spec in ("sparsemax", "kl", "bok:solver=exact", "tree-bok:beta=4"):
            lam = {} if spec.startswith("tree") else {"lam": torch.linspace(0, 2, 7).unsqueeze(-1)}
            chosen, context = decoder(spec)._with(lam), Context(siblings=torch.arange(1, 8))
            problem = chosen.problem(torch.zeros(7, 1), context if spec.startswith("tree") else None)
            plan = plan_for(problem, chosen.method(problem))
            assert plan is not None
            by_rows = plan.expand(torch.Size([7]))
            yield f"{spec} {size} by rows", lambda x=x, plan=by_rows: gpu.fused_distribution(x, plan)
        beta = torch.ones(7, dtype=torch.float64, device=DEVICE)
        yield f"moments {size}", lambda x=x, beta=beta: MomentsOnGPU(x).at(beta)
    codes = Codes.spread(range(90), 3, DEVICE)
    yield "codes spread again", lambda: gpu_codes.respread(codes, Siblings(270, 3, DEVICE))
    yield "codes moved on", lambda: gpu_codes.move_on(codes, codes.code, torch.zeros(270, device=DEVICE))
    kept = torch.randn(3, 2, 100, 64, device=DEVICE).to(torch.bfloat16)
    asked, lengths = kept[:, 0, :14].contiguous(), torch.tensor([1, 64, 100], device=DEVICE)
    yield "attention", lambda: attention(asked, kept, kept, torch.arange(3, device=DEVICE), lengths, 0.1)


def main(part: str) -> None:
    first, parts = map(int, part.split("/"))
    for name, run in islice(runs(), first - 1, None, parts):
        print(name, flush=True)
        run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print("all ran", flush=True)  # the sanitizer finds no errors in a program that failed before its first kernel


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "1/1")
