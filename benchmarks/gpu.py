"""From logits to a token on a GPU: the fused kernels beside a bare read, torch and FlashInfer, in one run.

    python benchmarks/gpu.py [--quick] [--out FILE.json]

Ours and `amax` under CUDA-graph replay, over buffers that together exceed the cache; torch's chain and FlashInfer
likewise where they can be captured. µs a call, GB/s of logits read, and ratios to the bare read.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

import simplexity
from record import record
from simplexity.kernels import gpu

CACHE = 256 << 20  # bytes of logits to go through before any is seen again
SIZES = (49_152, 151_936, 262_144)
BATCHES = (1, 32, 256)


def peaked(batch: int, size: int, dtype: torch.dtype) -> Tensor:
    """A head of a few hundred tokens above a broad floor, as models make them."""
    g = torch.Generator(device="cuda").manual_seed(0)
    x = 2.5 * torch.randn(batch, size, generator=g, device="cuda") - 12
    head = torch.randint(0, size, (batch, 300), generator=g, device="cuda")
    return x.scatter_add_(-1, head, 25 * torch.rand(batch, 300, generator=g, device="cuda").pow(3)).to(dtype)


def contenders(batch: int) -> dict[str, Callable[[Tensor], Any]]:
    """What is timed."""
    seeds = torch.arange(batch, device="cuda")
    plans = {
        "softmax": gpu.Plan("softmax", lam=0.8),
        "top-k 50": gpu.Plan("top-k", lam=0.8, k=50),
        "top-p 0.9": gpu.Plan("top-p", lam=0.8, tau=0.8, p=0.9),
        "sparsemax": gpu.Plan("sparsemax"),
        "entmax 1.5": gpu.Plan("entmax"),
    }
    found: dict[str, Callable[[Tensor], Any]] = {"amax (a bare read)": lambda x: x.amax(-1)}
    for name, plan in plans.items():
        found[name] = lambda x, plan=plan: gpu.fused_draw(x, plan, seeds).tokens
    found["torch softmax + multinomial"] = lambda x: torch.multinomial(torch.softmax(x.float() / 0.8, -1), 1)
    try:
        import flashinfer  # pyright: ignore[reportMissingImports]

        found["FlashInfer sampling_from_logits"] = lambda x: flashinfer.sampling.sampling_from_logits(x)
    except ImportError:
        pass
    return found


def time_us(run: Callable[[Tensor], Any], buffers: list[Tensor], replays: int) -> float:
    """Median µs a call under graph replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for x in buffers[:3]:
            run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in buffers:
            run(x)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(buffers))
    return sorted(times)[len(times) // 2]


def extra_memory(run: Callable[[Tensor], Any], x: Tensor) -> int:
    """Peak bytes a call takes beyond its input."""
    run(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(x)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    """Every size, batch and dtype, one table each."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="V = 151,936 in float32 only")
    options.add_argument("--out", type=Path, help="write the numbers as JSON")
    arguments = options.parse_args()
    sizes, dtypes = ((151_936,), (torch.float32,)) if arguments.quick else (SIZES, (torch.float32, torch.bfloat16))
    results = []
    for size in sizes:
        for dtype in dtypes:
            for batch in BATCHES:
                x = peaked(batch, size, dtype)
                bytes_ = x.numel() * x.element_size()
                buffers = [x.clone() for _ in range(max(2, min(400, -(-CACHE // bytes_))))]
                rows = {}
                for name, run in contenders(batch).items():
                    try:
                        us = time_us(run, buffers, 20)
                    except RuntimeError as error:
                        print(f"{name}: {str(error).splitlines()[0]}")
                        torch.cuda.synchronize()
                        continue
                    rows[name] = {"us": us, "extra_bytes": extra_memory(run, x)}
                bare = rows["amax (a bare read)"]["us"]
                print(f"\nV = {size:,}, batch {batch}, {str(dtype).removeprefix('torch.')}")
                print(f"{'':34}{'µs':>9}{'GB/s':>8}{'x read':>8}{'extra':>9}")
                for name, row in rows.items():
                    share = 100 * row["extra_bytes"] / (4 * x.numel())
                    print(
                        f"{name:34}{row['us']:9.1f}{bytes_ / row['us'] / 1e3:8.0f}{row['us'] / bare:8.2f}{share:8.2f}%"
                    )
                results.append(
                    {"vocabulary": size, "batch": batch, "dtype": str(dtype).removeprefix("torch."), "rows": rows}
                )
                del buffers, x
                torch.cuda.empty_cache()
    record(arguments.out, results, simplexity, torch, triton)


if __name__ == "__main__":
    main()
