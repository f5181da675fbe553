"""Compiles every Triton kernel for an H100 or H200, which takes no GPU, and prints what each takes of a multiprocessor.

    python tests/compiled_kernels.py [decoder ...]

The interpreter, in which the kernels are tested without a GPU, is more lenient than the compiler.
"""

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from simplexity import Codes, decoder
from simplexity.kernels import gpu, gpu_codes
from simplexity.kernels.gpu_attention import attention
from simplexity.kernels.gpu_moments import MomentsOnGPU
from simplexity.kernels.plans import Plan, plan_for
from simplexity.siblings import Siblings

SPECS = [
    "softmax", "top-k:k=50", "top-p:p=0.9", "min-p", "sparsemax", "entmax", "bok", "bok:weights=top-m",
    "bok:weights=uniform,steps=1", "bok:solver=exact", "bok:solver=exact,weights=top-m",
]  # fmt: skip
SHARED = 227 << 10  # bytes a program can have


class Hopper:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def plan_of(spec: str, **values: Any) -> Plan:
    chosen = decoder(spec)._with(values)
    problem = chosen.problem(torch.zeros(2, 1))
    plan = plan_for(problem, chosen.method(problem))
    assert plan is not None
    return plan


def main(specs: list[str]) -> None:
    driver.set_active(Hopper())  # pyright: ignore[reportArgumentType]
    run, what = jit.JITFunction.run, ""

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = run(self, *args, grid=grid, warmup=True, **options)
        took = made.metadata
        print(f"{what:40}{self.__name__:10}{took.num_warps:3} warps {took.shared:7} bytes shared", flush=True)
        assert took.shared <= SHARED
        return made

    jit.JITFunction.run = compiled
    gpu._early = lambda device: True  # as on the GPU this is compiled for
    seeds, uniforms = torch.arange(2), torch.rand(2, dtype=torch.float64)
    x = torch.zeros(2, 151_936)
    for spec in specs:
        what = spec
        gpu.fused_draw(x, plan_of(spec), seeds)
    for spec in ("softmax", "top-p:p=0.9", "bok"):
        what = f"{spec}, coupled, bfloat16"
        gpu.fused_draw(x.bfloat16(), plan_of(spec), uniforms=uniforms, places=True)
        what = f"{spec}, written"
        gpu.fused_distribution(x, plan_of(spec), log=True)
    for spec in ("sparsemax", "kl", "bok:solver=exact"):
        what = f"{spec}, λ by rows"
        plan = plan_of(spec, lam=torch.ones(2, 1)).expand(torch.Size([2]))
        gpu.fused_draw(x, plan, seeds)
        gpu.fused_distribution(x, plan)
    what = "two models"
    plan = Plan("two models", other=x)
    gpu.fused_draw(x, plan, uniforms=uniforms, places=True)
    gpu.fused_distribution(x, plan)
    what = "moments"
    MomentsOnGPU(x).at(torch.ones(2, dtype=torch.float64))
    what, codes = "codes", Codes.spread([1, 2], 3)
    gpu_codes.respread(codes, Siblings(6, 3))
    gpu_codes.move_on(codes, torch.rand(6, dtype=torch.float64), torch.zeros(6))
    what, kept = "attention", torch.zeros(2, 2, 64, 64, dtype=torch.bfloat16)
    attention(torch.zeros(2, 14, 64, dtype=torch.bfloat16), kept, kept, torch.arange(2), torch.ones(2).long(), 0.1)


if __name__ == "__main__":
    main(sys.argv[1:] or SPECS)
