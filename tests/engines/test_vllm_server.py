"""vLLM's HTTP server under our decoders: what a client sees, and what a day of clients leaves behind."""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from needed import needed

httpx, psutil = needed("vllm", "httpx"), needed("vllm", "psutil")
needed("vllm", "vllm")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from simplexity.embedded import unpacked  # noqa: E402
from vllm_server import NAME, server  # noqa: E402

VALID = [None, "softmax:temperature=0.8", "top-p:p=0.9", "sparsemax", "bok:k=16", "min-p:p=0.1,repetition=1.1"]
INVALID = [
    ({"vllm_xargs": {"decoder": "bok:k=-1"}}, "k must be"),
    ({"vllm_xargs": {"decoder": "nucleus"}}, "unknown decoder"),
    ({"vllm_xargs": {"decoder": "bok"}, "temperature": 0.7}, "temperature=0.7 would change"),
    ({"vllm_xargs": {"decoder": "bok"}, "top_p": 0.9}, "top_p=0.9 would change"),
    ({"vllm_xargs": {"decoder": "contrastive"}}, "another model's logits"),
    ({"vllm_xargs": {"decoder": {"decoder": "bok"}}}, "vllm_xargs"),
    ({"vllm_xargs": {"decoder": "bok", "measure": 1}}, "in its own process can look on"),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    try:
        with server(str(unpacked()), "--logprobs-mode", "processed_logprobs", log=log) as found:
            yield found
    finally:
        print(log.read_text()[-4000:])


def body(**rest):
    return {"model": NAME, "prompt": "The old man and the", "max_tokens": 12, **rest}


async def send(client, number, seen):
    """One request: valid, invalid or cancelled midway; what came of it."""
    if number % 7 == 3:
        rest, words = INVALID[number // 7 % len(INVALID)]
        answer = await client.post("/v1/completions", json=body(**rest))
        assert answer.status_code == 400, (rest, answer.text)
        assert words in json.dumps(answer.json(), ensure_ascii=False), (words, answer.text)
        seen["refused"] += 1
        return
    spec = VALID[number % len(VALID)]
    given = body(seed=number, **({} if spec is None else {"vllm_xargs": {"decoder": spec}}))
    if number % 9 == 4:
        async with client.stream("POST", "/v1/completions", json={**given, "stream": True, "max_tokens": 200}) as got:
            assert got.status_code == 200
            async for _ in got.aiter_lines():
                break  # and hang up
        seen["cancelled"] += 1
        return
    answer = await client.post("/v1/completions", json=given)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0
    seen["answered"] += 1


async def crowd(address, numbers):
    """Requests, 16 at a time."""
    seen, room = Counter(), asyncio.Semaphore(16)
    async with httpx.AsyncClient(base_url=address, timeout=None) as client:

        async def one(number):
            async with room:
                await send(client, number, seen)

        await asyncio.gather(*(one(number) for number in numbers))
    return seen


def memory() -> int:
    """Bytes held by the server's processes, children of this one."""
    found = psutil.Process().children(recursive=True)
    return sum(process.memory_info().rss for process in found)


def test_two_hundred_requests(address):
    seen = asyncio.run(crowd(address, range(200)))
    assert seen == {"refused": 29, "cancelled": 19, "answered": 152}
    before = memory()
    seen = asyncio.run(crowd(address, range(200, 400)))
    assert sum(seen.values()) == 200
    assert memory() - before < 50e6, "memory grows with finished requests"
    seen = asyncio.run(crowd(address, [0, 1, 2]))
    assert seen == {"answered": 3}, "the server still serves"


def test_log_probabilities_over_http(address):
    given = body(prompt="The capital of France is", logprobs=5, max_tokens=4, vllm_xargs={"decoder": "top-k:k=1"})
    answer = httpx.post(f"{address}/v1/completions", json=given, timeout=None).json()
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx([0.0] * 4, abs=1e-3)


def test_the_openai_client(address):
    command = [sys.executable, str(ROOT / "examples/vllm_openai_client.py"), f"{address}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, "NO_PROXY": "*"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("log q = ") == 9
    assert "refused: bok: k must be" in done.stdout


def test_the_offline_example():
    command = [sys.executable, str(ROOT / "examples/vllm_offline.py"), str(unpacked())]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for spec in ("softmax", "top-p:p=0.8", "sparsemax:lam=2", "bok:k=16,temperature=1.2"):
        assert f"\n{spec:26} " in done.stdout
