"""Any decoder inside llama.cpp, through llama-cpp-python.

python examples/llama_cpp_decoders.py [model.gguf]
"""

import sys

from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

from simplexity.embedded import gguf_file
from simplexity.engines.llama_cpp import SETTINGS, DecoderProcessor, generate, stream

path = sys.argv[1] if len(sys.argv) > 1 else str(gguf_file())
llama = Llama(path, n_ctx=512, verbose=False)
chat = [{"role": "user", "content": "Name a river in Europe."}]

# texts, each with the seed that repeats it
texts = generate(llama, chat, "bok:temperature=0.8", n=3, max_tokens=16, seed=1)
for found in texts:
    print(f"{found.decoder}  {found.seed}  {found.text!r}")

# the last one again, piece by piece
for piece in stream(llama, chat, "bok:temperature=0.8", max_tokens=16, seed=texts[-1].seed):
    print(piece, end="", flush=True)
print()

# or as a logits processor in a call of your own; here llama.cpp draws from the decoder's q
with DecoderProcessor("top-p:p=0.9", engine_draws=True) as processor:
    answer = llama("The capital of France is", max_tokens=8, logits_processor=[processor], **SETTINGS)
print(answer["choices"][0]["text"])
