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
from simplexity.kernels.plans import Plan, plan_for

CACHE = 256 << 20  # bytes of logits to go through before any is seen again
SECONDS = 1.0  # after which three replays do
SIZES = (49_152, 151_936, 262_144)
BATCHES = (1, 32, 256)


T = 0.8
READ, CHAIN = "amax (a bare read)", "torch softmax + multinomial"
SPECS = (
    f"softmax:temperature={T}",
    f"top-k:k=50,temperature={T}",
    f"top-p:p=0.9,temperature={T}",
    f"min-p:p=0.1,temperature={T}",
    "sparsemax",
    "entmax",
    f"bok:temperature={T}",
    f"bok:temperature={T},weights=top-m",
    f"bok:temperature={T},solver=exact",
    f"bok:temperature={T},solver=exact,weights=top-m",
)


def logits(shape: str, batch: int, size: int, dtype: torch.dtype) -> Tensor:
    """Peaked: a head of a few hundred tokens above a broad floor. Flat: standard normal.

    Text: scores that fall with the logarithm of the rank, at slopes and bends as in the middle of a model's texts,
    where all of the vocabulary weighs a little.
    """
    g = torch.Generator(device="cuda").manual_seed(0)
    if shape == "text":
        slope = 1.6 + 0.6 * torch.rand(batch, 1, generator=g, device="cuda")
        bend = 0.3 * (10 / 0.3) ** torch.rand(batch, 1, generator=g, device="cuda")
        x = -slope * torch.log1p(torch.arange(size, device="cuda") / bend)
        return x[:, torch.randperm(size, generator=g, device="cuda")].to(dtype)
    x = torch.randn(batch, size, generator=g, device="cuda")
    if shape == "flat":
        return x.to(dtype)
    head = torch.randint(0, size, (batch, 300), generator=g, device="cuda")
    tall = 25 * torch.rand(batch, 300, generator=g, device="cuda").pow(3)
    return (2.5 * x - 12).scatter_add_(-1, head, tall).to(dtype)


def plan_of(spec: str) -> Plan:
    """What the kernels are told of a decoder."""
    chosen = simplexity.decoder(spec)
    problem = chosen.problem(torch.zeros(1, 1))
    plan = plan_for(problem, chosen.method(problem))
    assert plan is not None
    return plan


def contenders(batch: int) -> dict[str, Callable[[Tensor], Any]]:
    """What is timed."""
    seeds = torch.arange(batch, device="cuda")
    found: dict[str, Callable[[Tensor], Any]] = {READ: lambda x: x.amax(-1)}
    for spec in SPECS:
        plan = plan_of(spec)
        found[spec] = lambda x, plan=plan: gpu.fused_draw(x, plan, seeds).tokens
    found[CHAIN] = lambda x: torch.multinomial(torch.softmax(x.float() / T, -1), 1)
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
    times: list[float] = []
    while len(times) < replays and (len(times) < 3 or sum(times) * len(buffers) < SECONDS * 1e6):
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


def swept(spec: str, x: Tensor) -> float:
    """The share of rows that their head did not suffice for."""
    return gpu.fused_draw(x, plan_of(spec), torch.arange(len(x), device="cuda")).swept.float().mean().item()


def measure(x: Tensor) -> dict[str, dict[str, float]]:
    """What every contender takes for these logits."""
    copies = max(2, min(400, -(-CACHE // (x.numel() * x.element_size()))))
    buffers, rows = [x.clone() for _ in range(copies)], {}
    for name, run in contenders(len(x)).items():
        try:
            us = time_us(run, buffers, 20)
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}")
            torch.cuda.synchronize()
            continue
        rows[name] = {"us": us, "extra_bytes": extra_memory(run, x)}
        if name in SPECS:
            rows[name]["swept"] = swept(name, x)
    return rows


def show(rows: dict[str, dict[str, float]], x: Tensor) -> None:
    """One table."""
    read, chain = rows[READ]["us"], rows[CHAIN]["us"]
    print(f"{'':46}{'µs':>8}{'GB/s':>7}{'/read':>7}{'chain/':>8}{'extra':>8}{'swept':>7}")
    for name, row in rows.items():
        speed = x.numel() * x.element_size() / row["us"] / 1e3
        share, rare = row["extra_bytes"] / (4 * x.numel()), f"{row['swept']:.0%}" if "swept" in row else ""
        us = row["us"]
        print(f"{name:46}{us:8.1f}{speed:7.0f}{us / read:7.2f}{chain / us:7.1f}x{share:8.2%}{rare:>7}")


def main() -> None:
    """Every size, batch and dtype, one table each; flat rows and those of a text at one size."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="V = 151,936 in float32 only")
    options.add_argument("--out", type=Path, help="write the numbers as JSON")
    arguments = options.parse_args()
    cases = [(shape, 151_936, torch.float32) for shape in ("peaked", "text", "flat")]
    if not arguments.quick:
        cases += [("peaked", size, dtype) for size in SIZES for dtype in (torch.float32, torch.bfloat16)]
    results = []
    for shape, size, dtype in dict.fromkeys(cases):
        for batch in BATCHES:
            x, kind = logits(shape, batch, size, dtype), str(dtype).removeprefix("torch.")
            rows = measure(x)
            print(f"\n{shape} logits, V = {size:,}, batch {batch}, {kind}")
            show(rows, x)
            results.append({"shape": shape, "vocabulary": size, "batch": batch, "dtype": kind, "rows": rows})
            del x
            torch.cuda.empty_cache()
            record(arguments.out, results, simplexity, torch, triton)  # whole so far: a run may be cut off


if __name__ == "__main__":
    main()
