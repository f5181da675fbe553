"""Tokens a second of a vLLM server with a decoder on every request, beside plain sampling on the same server.

    .venv-vllm/bin/python benchmarks/vllm_server.py --model DIR [--decoder bok] [--out FILE]

Rounds of plain and decoded requests take turns, so that both see the same machine; the ratio is that of the medians.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
import vllm

from record import record

NAME = "model"


@contextlib.contextmanager
def server(model: str, *flags: str, log: Path | None = None) -> Iterator[str]:
    """The address of a server of vLLM's own that runs until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", NAME,
        "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--dtype", "float32", "--max-model-len", "1024",
        "--max-num-seqs", "16", "--generation-config", "vllm", *flags,
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with contextlib.ExitStack() as stack:
        out: Any = subprocess.DEVNULL if log is None else stack.enter_context(log.open("w"))
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        address = f"http://127.0.0.1:{port}"
        for _ in range(600):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}: see {log}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            time.sleep(1)
        yield address


async def round_of(address: str, decoder: str | None, batch: int, tokens: int) -> float:
    """Tokens a second of `batch` requests at once."""
    body: dict[str, Any] = {
        "model": NAME, "prompt": "Write a long story about the sea.", "max_tokens": tokens, "ignore_eos": True,
        "temperature": 1.0,
    }  # fmt: skip
    if decoder is not None:
        body["vllm_xargs"] = {"decoder": decoder}
    async with httpx.AsyncClient(timeout=None) as client:
        start = time.perf_counter()
        found = await asyncio.gather(
            *(client.post(f"{address}/v1/completions", json={**body, "seed": seed}) for seed in range(batch))
        )
        seconds = time.perf_counter() - start
    written = sum(answer.raise_for_status().json()["usage"]["completion_tokens"] for answer in found)
    return written / seconds


def compare(address: str, decoder: str, batch: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of each round, plain and with the decoder, and the ratio of their medians."""
    rates: dict[str | None, list[float]] = {None: [], decoder: []}
    for number in range(rounds + 1):
        for kind in (None, decoder) if number % 2 else (decoder, None):
            rate = asyncio.run(round_of(address, kind, batch, tokens))
            if number:  # the first round warms up
                rates[kind].append(rate)
                print(f"  round {number}  {kind or 'plain':12} {rate:7.1f} tokens/s", flush=True)
    plain, ours = statistics.median(rates[None]), statistics.median(rates[decoder])
    return {"plain": rates[None], decoder: rates[decoder], "ratio": ours / plain}


def main() -> None:
    """Start a server, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--decoder", action="append", help="a spec, repeated for several (default: bok)")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    results = {}
    with server(given.model) as address:
        for spec in given.decoder or ["bok"]:
            found = results[spec] = compare(address, spec, given.batch, given.tokens, given.rounds)
            print(f"{spec}: {found['ratio']:.3f} of plain sampling's tokens/s, {given.batch} requests at once")
    record(given.out, [{"batch": given.batch, "tokens": given.tokens, **results}], torch, vllm)


if __name__ == "__main__":
    main()
