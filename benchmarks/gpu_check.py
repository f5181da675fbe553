"""On a GPU: no decoder synchronises without validation, each can be captured in a graph, all agree with the CPU.

python benchmarks/gpu_check.py
"""

import torch

from simplexity import decoder, decoders

SPECS = [
    *(name for name, kind in decoders().items() if not kind.needs),
    "top-p:p=0.5,temperature_last=true",
    "entmax:alpha=1.2",
    "bok:weights=top-m",
    "bok:weights=rank",
    "bok:solver=exact",
    "bok:solver=exact,weights=uniform,beta=2",
    "bok:weights=uniform,beta=50,k=64,lam=1",
    "softmax:entropy=2",
]


def check(spec: str, size: int, batch: int) -> str:
    """One line on one decoder."""
    d = decoder(spec)
    scores = 4 * torch.randn(batch, size, generator=torch.Generator().manual_seed(1))
    on_gpu, seeds = scores.cuda(), torch.arange(batch, device="cuda")
    expected, tokens = d.distribution(scores), d.sample(scores, seeds=seeds.cpu(), step=3)

    d.distribution(on_gpu, validate=False)  # warm up: the first calls load kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    q, status = d.distribution(on_gpu, validate=False)
    drawn, _ = d.sample(on_gpu, seeds=seeds, step=3, validate=False)
    torch.cuda.set_sync_debug_mode("default")
    assert not status.any()
    distance = (q.cpu() - expected).abs().sum(-1).max().item() / 2
    same = (drawn.cpu() == tokens).float().mean().item()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = d.distribution(on_gpu, validate=False)
    on_gpu.copy_(scores.flip(0))
    graph.replay()
    replayed = (captured.cpu() - expected.flip(0)).abs().sum(-1).max().item() / 2
    checked = (d.distribution(scores.cuda()).cpu() - expected).abs().sum(-1).max().item() / 2
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    us = 100 * start.elapsed_time(end)
    return f"{spec:44}{distance:10.1e}{replayed:10.1e}{checked:10.1e}{same:8.3f}{us:11.0f}"


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for size, batch in [(1000, 4), (151_936, 32)]:
        print(f"\nV = {size:,}, batch {batch}: total variation to the CPU's q")
        print(f"{'':44}{'eager':>10}{'graph':>10}{'checked':>10}{'tokens':>8}{'µs/replay':>11}")
        for spec in SPECS:
            print(check(spec, size, batch), flush=True)
