"""Any decoder inside transformers' `model.generate`, with log-probabilities for reranking or RL.

python examples/transformers_generate.py
"""

from simplexity.engines.transformers import Sampling, generate
from simplexity.models import load_model

loaded = load_model()  # the embedded model; or load_model("Qwen/Qwen2.5-0.5B-Instruct")
inputs = loaded.encode(["Name a river in Europe.", "Name a bird."])

# as an argument of model.generate
output = loaded.model.generate(
    **inputs, custom_generate=Sampling("bok:temperature=0.8", seeds=[1, 2]), max_new_tokens=16
)
print(loaded.text(output[0, inputs["input_ids"].shape[1] :]))

# or as a function: four samples a prompt, each token with log q (the decoder's) and log p (the model's)
found = generate(
    loaded.model, inputs["input_ids"], "top-p:p=0.9", n=4, max_new_tokens=16, seeds=[1, 2], trace=True,
    attention_mask=inputs["attention_mask"],
)  # fmt: skip
assert found.log_p is not None
best = found.log_p.sum(-1).view(2, 4).argmax(-1)
for prompt, pick in enumerate(best.tolist()):
    print(loaded.text(found.tokens[4 * prompt + pick]))
