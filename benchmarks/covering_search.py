"""Ways to draw a group of samples, compared by who is right.

    python benchmarks/covering_search.py --task humaneval --data HumanEval.jsonl.gz --model M --out FOLDER \
        --arm "softmax t=0.6" --arm "coupled t=0.6" --arm "quotas t=0.6 m=3" --arm "tree alone=0.2 together=1.2"

Every second question from the first (or, with --second-half, from the second), n samples each in groups of k. An arm's
file is written when it is graded; of all that are there pass@1 and pass@k are printed. Programs of the model are run.

`line` is the temperature of the first token of a line, `hot` that of tokens whose entropy exceeds `above`; the tree
has its own. Coupled and tree: `order=prob` reads codes over the tokens from the most probable on, `order=alike` with
tokens of similar output embeddings side by side, instead of by number.

A text's local context is its last m tokens; with fork=1 also which two tokens are the best to come. With like=0.9
only places count whose distribution q' overlaps with this one's so much, Σ √(q·q') over the four best tokens of each.
Quotas: where the others of the group were v times and chose a token c times, a text draws it by
max(0, (v+1)·p − strength·c); texts that arrive at the same step share evenly spread numbers.

Latin: at each step the group's numbers are evenly spread over (0, 1) and dealt out anew, whatever the texts are; they
are read over the tokens from the most probable on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simplexity import Codes, Context, decoder
from simplexity.draw import derive_seeds, derived_seed, inverse_cdf, uniform
from simplexity.engines.many_rows import LOOK, ManyRows
from simplexity.evaluation.plan import RunPlan, seed_of
from simplexity.evaluation.task import Question, Task
from simplexity.evaluation.tasks import task as named_task
from simplexity.models import LanguageModel, load_model
from simplexity.siblings import Siblings

WIDTH = 4  # tokens that two distributions are compared by


class Draws:
    """Independent draws of a softmax at temperature t, or at one for each member of a group (t=0.1/0.5/0.9/1.2)."""

    grouped = False

    def __init__(self, options: dict[str, str], seeds: Tensor, n: int, k: int, model: LanguageModel) -> None:
        self.options, self.k = options, k
        self.breaks = line_ends(model, seeds.device) if "line" in options else None
        self.groups = derive_seeds(seeds, n // k).repeat_interleave(k)
        self.own = derive_seeds(seeds, n)
        given = [float(t) for t in options.get("t", "1").split("/")]
        self.t = torch.tensor(given, device=seeds.device).repeat(len(self.own) // len(given))

    def draw(self, scores: Tensor, slots: Tensor, written: Tensor, step: int) -> Tensor:
        """The next token of the rows in these slots."""
        return inverse_cdf(self.q(scores, self.warmth(scores, slots, written, step)), uniform(self.own[slots], step))

    def warmth(self, scores: Tensor, slots: Tensor, written: Tensor, step: int) -> Tensor:
        """The temperature of each row's next token."""
        t = self.t[slots]
        if self.breaks is not None:
            begins = (
                self.breaks[written[slots, step - 1].clamp_min(0)] if step else torch.ones_like(t, dtype=torch.bool)
            )
            t = torch.where(begins, float(self.options["line"]), t)
        if "hot" in self.options:
            q = (scores / t.unsqueeze(-1)).softmax(-1)
            fork = torch.special.entr(q).sum(-1) > float(self.options["above"])
            t = torch.where(fork, float(self.options["hot"]), t)
        return t

    def q(self, scores: Tensor, t: Tensor) -> Tensor:
        """A softmax, without what is below `minp` of its best token."""
        q = (scores / t.unsqueeze(-1)).softmax(-1)  # in float32, as t is
        if "minp" not in self.options:
            return q
        q = torch.where(q >= float(self.options["minp"]) * q.amax(-1, keepdim=True), q, 0.0)
        return q / q.sum(-1, keepdim=True)

    def keep(self, kept: Tensor) -> None:
        """Only these rows go on."""


class Coupled(Draws):
    """Evenly spread codes."""

    grouped = True

    def __init__(self, options: dict[str, str], seeds: Tensor, n: int, k: int, model: LanguageModel) -> None:
        super().__init__(options, seeds, n, k, model)
        self.codes = Codes.spread(derive_seeds(seeds, n // k), k, seeds.device)
        self.alike = by_likeness(model) if options.get("order") == "alike" else None

    def draw(self, scores: Tensor, slots: Tensor, written: Tensor, step: int) -> Tensor:
        """As above."""
        return self.read(self.q(scores, self.warmth(scores, slots, written, step)))

    def read(self, q: Tensor) -> Tensor:
        """The codes read over q, its tokens in the order that was asked for."""
        if self.alike is not None:
            return self.alike[self.codes.draw(q[:, self.alike])]
        if self.options.get("order") == "prob":
            q, tokens = q.sort(dim=-1, descending=True, stable=True)
            return tokens.gather(-1, self.codes.draw(q).unsqueeze(-1)).squeeze(-1)
        return self.codes.draw(q)

    def keep(self, kept: Tensor) -> None:
        """As above."""
        self.codes.code, self.codes.seeds = self.codes.code[kept], self.codes.seeds[kept]


class Tree(Coupled):
    """`tree-bok`: a temperature while texts are the same, another afterwards, and its reward where `beta` is given.

    K counts the texts that are the same so far; with count=group all of the group, with count=context those that have
    the last m tokens in common.
    """

    def __init__(self, options: dict[str, str], seeds: Tensor, n: int, k: int, model: LanguageModel) -> None:
        super().__init__(options, seeds, n, k, model)
        self.siblings = Siblings(len(self.own), k, seeds.device)
        own = {name: value for name, value in options.items() if name not in ("count", "last", "order")}
        self.decoder = decoder({"decoder": "tree-bok", "beta": "0"} | own)

    def draw(self, scores: Tensor, slots: Tensor, written: Tensor, step: int) -> Tensor:
        """As above."""
        if step:
            self.siblings.follow(written[slots, step - 1])
        self.codes.respread(self.siblings)
        count = self.siblings.count
        if self.options.get("count") == "group":
            count = torch.full_like(count, self.k)
        if self.options.get("count") == "context":
            here = context_of(written, slots, step, int(self.options.get("last", "3"))).view(-1, self.k)
            count = (here.unsqueeze(-1) == here.unsqueeze(-2)).sum(-1).flatten()
        return self.read(self.decoder.log_distribution(scores, Context(siblings=count))[0].exp_())

    def keep(self, kept: Tensor) -> None:
        """As above."""
        super().keep(kept)
        self.siblings.same = self.siblings.same[kept[:: self.k] // self.k]


class Quotas(Draws):
    """Draws that make up for what the others of the group chose in the same local context.

    `first` is the temperature where nobody has been yet.
    """

    grouped = True

    def __init__(self, options: dict[str, str], seeds: Tensor, n: int, k: int, model: LanguageModel) -> None:
        super().__init__(options, seeds, n, k, model)
        self.m = int(options.get("m", "6"))
        self.contexts = torch.zeros(len(self.own), 0, dtype=torch.int64, device=seeds.device)
        self.best = torch.zeros(len(self.own), 0, WIDTH, dtype=torch.int32, device=seeds.device)
        self.roots = torch.zeros(len(self.own), 0, WIDTH, device=seeds.device)

    def draw(self, scores: Tensor, slots: Tensor, written: Tensor, step: int) -> Tensor:
        """As above."""
        here = context_of(written, slots, step, self.m)
        if "fork" in self.options:
            here = derived_seed(here, _best_two(scores))
        column = torch.zeros_like(self.own)
        column[slots] = here
        groups, others = slots.view(-1, self.k), ~torch.eye(self.k, dtype=torch.bool, device=slots.device)
        tokens = written[groups][:, :, :step].unsqueeze(1)  # a text that has ended has -1
        same = self.contexts[groups].unsqueeze(1) == here.view(-1, self.k, 1, 1)
        hit = (same & (tokens >= 0) & others[None, :, :, None]).reshape(len(slots), -1)
        tokens = tokens.expand(-1, self.k, -1, -1).reshape(len(slots), -1)
        self.contexts = torch.cat([self.contexts, column.unsqueeze(-1)], -1)
        t = self.warmth(scores, slots, written, step)
        if "like" in self.options:
            hit &= self.alike(self.q(scores, t), slots, groups)
        visits = hit.sum(-1)
        if "first" in self.options:
            t = torch.where(visits == 0, float(self.options["first"]), t)
        strength = float(self.options.get("strength", "1"))
        q = self.q(scores, t)
        left = (q * (visits + 1).unsqueeze(-1)).scatter_add_(1, tokens.clamp_min(0), -strength * hit.float())
        left.clamp_min_(0.0)
        # with a strength above 1 the others may have used up everything
        q = left if strength <= 1 else torch.where(left.sum(-1, keepdim=True) > 1e-6, left, q)
        together = here.view(-1, self.k, 1) == here.view(-1, 1, self.k)
        rank = (together & torch.ones_like(together[0]).tril(-1)).sum(-1) / together.sum(-1)
        shared = uniform(derived_seed(self.groups[slots], here), step)
        return inverse_cdf(q, (shared + rank.flatten().double()) % 1.0)

    def alike(self, q: Tensor, slots: Tensor, groups: Tensor) -> Tensor:
        """Which earlier places of the group had a distribution like this one, `[rows, k · steps]`."""
        mass, best = q.topk(WIDTH)
        roots, best = mass.sqrt().view(*groups.shape, WIDTH), best.int().view(*groups.shape, WIDTH)
        earlier, their = self.best[groups].unsqueeze(1), self.roots[groups].unsqueeze(1)
        overlap = torch.zeros(*groups.shape, self.k, self.best.shape[1], device=q.device)
        for i, j in itertools.product(range(WIDTH), repeat=2):
            same = best[:, :, i, None, None] == earlier[..., j]
            overlap += same * roots[:, :, i, None, None] * their[..., j]
        places = torch.zeros(len(self.own), 1, WIDTH, dtype=torch.int32, device=q.device)
        self.best = torch.cat([self.best, places.index_copy(0, slots, best.view(-1, 1, WIDTH))], 1)
        self.roots = torch.cat([self.roots, places.float().index_copy(0, slots, roots.view(-1, 1, WIDTH))], 1)
        return (overlap >= float(self.options["like"])).view(len(slots), -1)


class Latin(Draws):
    """One number from each k-th of (0, 1), dealt out anew at every step, over the tokens by their probability."""

    grouped = True

    def draw(self, scores: Tensor, slots: Tensor, written: Tensor, step: int) -> Tensor:
        """As above."""
        mine = uniform(self.own[slots], 2 * step + 1).view(-1, self.k)
        dealt = mine.argsort(-1).argsort(-1).flatten()
        numbers = (uniform(self.groups[slots], 2 * step) + dealt / self.k) % 1.0
        q, tokens = self.q(scores, self.warmth(scores, slots, written, step)).sort(dim=-1, descending=True, stable=True)
        return tokens.gather(-1, inverse_cdf(q, numbers).unsqueeze(-1)).squeeze(-1)


def context_of(written: Tensor, slots: Tensor, step: int, m: int) -> Tensor:
    """A number for the last m tokens of each row."""
    found = torch.zeros_like(slots)
    for place in range(step - m, step):
        found = derived_seed(found, written[slots, place] if place >= 0 else torch.full_like(slots, -1))
    return found


def line_ends(model: LanguageModel, device: torch.device) -> Tensor:
    """Which tokens end a line, `[V]`."""
    size = model.model.get_output_embeddings().weight.shape[0]
    texts = model.tokenizer.batch_decode([[i] for i in range(min(size, len(model.tokenizer)))])
    found = torch.tensor([text.rstrip(" \t").endswith("\n") for text in texts], device=device)
    return torch.cat([found, found.new_zeros(size - len(found))])


def by_likeness(model: LanguageModel) -> Tensor:
    """The tokens by the first principal component of their output embeddings, `[V]`."""
    table = model.model.get_output_embeddings().weight.float()
    centred = table - table.mean(0)
    direction = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -1]
    return (centred @ direction).argsort(stable=True)


def _best_two(scores: Tensor) -> Tensor:
    """A number for the two best tokens, in either order, `[rows]`."""
    first = scores.argmax(-1, keepdim=True)
    second = scores.scatter(-1, first, -torch.inf).argmax(-1, keepdim=True)
    return (torch.minimum(first, second) * scores.shape[-1] + torch.maximum(first, second)).squeeze(-1)


WAYS: dict[str, type[Draws]] = {"softmax": Draws, "coupled": Coupled, "tree": Tree, "quotas": Quotas, "latin": Latin}


def write(many: ManyRows, draws: Draws, prompts: list[list[int]], n: int, limit: int, ends: Sequence[int]) -> Any:
    """(tokens `[rows, limit]`, lengths `[rows]`), as lists."""
    count, device = len(prompts) * n, many.device
    many.read(prompts, n)
    unit = draws.k if draws.grouped else 1
    slots, over = torch.arange(count, device=device), torch.zeros(count, dtype=torch.bool, device=device)
    written = torch.full((count, limit), -1, dtype=torch.int64, device=device)
    lengths, stops = torch.full((count,), limit, device=device), torch.tensor(ends, device=device)
    for step in range(limit):
        live = len(slots)
        tokens = draws.draw(many.step(live)[1][:live], slots, written, step)
        written[slots, step] = torch.where(over, -1, tokens)
        many.tokens[:live], many.lengths[:live] = tokens, many.lengths[:live] + 1
        new = torch.isin(tokens, stops) & ~over
        lengths[slots] = torch.where(new, step + 1, lengths[slots])
        over |= new
        if step % LOOK == LOOK - 1:
            stay = (~over).view(-1, unit).any(-1).repeat_interleave(unit)
            kept = stay.nonzero().squeeze(-1)
            if not len(kept):
                break
            order = torch.cat([kept, (~stay).nonzero().squeeze(-1)])
            for table in (many.slots, many.tokens, many.lengths):
                table[:live] = table[:live][order]
            slots, over = slots[kept], over[kept]
            draws.keep(kept)
    return written.tolist(), lengths.tolist()


def graded(path: Path, arm: str, chosen: Task, pairs: list[tuple[Question, str]], grader: Any, n: int, k: int) -> None:
    """Write who was right, a 0 or 1 for each sample of a question, and who said the same, by the first who did."""
    right: dict[str, str] = {}
    said: dict[str, list[str | None]] = {}
    for (question, _), grade in zip(pairs, grader.grade(pairs), strict=True):
        right[question.id] = right.get(question.id, "") + str(int(grade.correct))
        said.setdefault(question.id, []).append(grade.answer)
    answers = {id: [-1 if x is None else row.index(x) for x in row] for id, row in said.items()}
    found = {"arm": arm, "task": chosen.name, "n": n, "k": k, "right": right, "answers": answers}
    path.write_text(json.dumps(found) + "\n")
    print(f"  graded {arm}", flush=True)


def independent(arm: str) -> bool:
    """Whether the samples of an arm know nothing of each other; members with temperatures of their own make a group."""
    return arm.split()[0] == "softmax" and "/" not in arm


def line(found: dict[str, Any]) -> str:
    """pass@1 and pass@k: over all subsets where samples are independent, otherwise over the groups."""
    n, k, rows = found["n"], found["k"], found["right"].values()
    alone = sum(row.count("1") for row in rows) / (n * len(rows))
    if independent(found["arm"]):
        held = [1 - math.comb(row.count("0"), k) / math.comb(n, k) for row in rows]
    else:
        held = [sum("1" in row[i : i + k] for i in range(0, n, k)) / (n // k) for row in rows]
    return f"{found['arm']:40} pass@1 {100 * alone:5.1f}   pass@{k} {100 * sum(held) / len(held):5.1f}"


def main() -> None:
    """Run the arms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arm", action="append", required=True, dest="arms")
    parser.add_argument("--second-half", action="store_true")
    parser.add_argument("--limit", type=int)
    parser.add_argument("-n", type=int, default=16)
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=512)
    given = parser.parse_args()
    chosen = named_task(given.task)
    chosen.allow_code_execution = True
    questions = chosen.load(given.data)[int(given.second_half) :: 2][: given.limit]
    model = load_model(given.model)
    inputs = model.encode([q.prompt for q in questions], system=chosen.system)
    rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    prompts = [ids[own].tolist() for ids, own in rows]
    plan = RunPlan(given.model, given.task, ("softmax",), n=given.n, batch=given.n)
    seeds = torch.tensor([seed_of(plan, q) for q in questions], device=model.model.device)
    many = ManyRows(model.model, len(prompts) * given.n, max(map(len, prompts)) + given.max_tokens)
    given.out.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode(), many.attached(), chosen.grader() as grader, ThreadPoolExecutor(1) as pool:
        waiting = []
        for arm in given.arms:
            way, *options = arm.split()
            start = time.perf_counter()
            draws = WAYS[way](dict(option.split("=") for option in options), seeds, given.n, given.k, model)
            tokens, lengths = write(many, draws, prompts, given.n, given.max_tokens, model.ends)
            texts = [model.text(ids[:length]) for ids, length in zip(tokens, lengths, strict=True)]
            print(f"{arm}: {sum(lengths)} tokens in {time.perf_counter() - start:.1f} s", flush=True)
            pairs = [(questions[i // given.n], text) for i, text in enumerate(texts)]
            path = given.out / f"{arm.replace(' ', '-').replace('/', '_')}.json"
            waiting.append(pool.submit(graded, path, arm, chosen, pairs, grader, given.n, given.k))
        for job in waiting:
            job.result()
    for path in sorted(given.out.glob("*.json")):
        print(line(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
