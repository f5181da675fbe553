"""The openai package against a vLLM server with simplexity installed: each request names its decoder.

    python -m vllm.entrypoints.openai.api_server --model MODEL --generation-config vllm \
        --logprobs-mode processed_logprobs
    python examples/vllm_openai_client.py http://localhost:8000/v1
"""

# pyright: reportMissingImports=false

import sys

from openai import BadRequestError, OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="none")
model = client.models.list().data[0].id
question = [{"role": "user", "content": "Name a colour."}]

for decoder in ["bok:k=16", "top-p:p=0.8,temperature=1.3", None]:
    answer = client.chat.completions.create(
        model=model,
        messages=question,
        n=3,
        max_tokens=12,
        seed=1,
        temperature=1,  # what shapes the distribution stands in the decoder
        logprobs=True,
        top_logprobs=2,
        extra_body={"vllm_xargs": {"decoder": decoder}} if decoder else None,
    )
    print(decoder or "vLLM's own sampling")
    for choice in answer.choices:
        log_q = [token.logprob for token in choice.logprobs.content]  # with processed_logprobs
        print(f"  {choice.message.content!r}, log q = {sum(log_q):.2f}")

try:
    client.chat.completions.create(model=model, messages=question, extra_body={"vllm_xargs": {"decoder": "bok:k=-1"}})
except BadRequestError as error:
    print("refused:", error.body["message"])
