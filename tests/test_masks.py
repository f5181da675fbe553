"""Supports from outside: grammars, banned strings and token sets, in every decoder and in transformers."""

import itertools
import json

import jsonschema
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from simplexity import Context, decoder, decoders
from simplexity.engines.transformers import DecoderProcessor, Sampling, generate
from simplexity.masks import RowMasker, allowed
from simplexity.masks.banned import BannedStrings, automaton
from simplexity.masks.grammar import Grammar
from simplexity.masks.token_sets import TokenSets
from test_cli import run  # noqa: F401
from test_transformers_engine import chi_square

pytestmark = pytest.mark.xdist_group("model")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "tall": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "tall"],
    "additionalProperties": False,
}
LIVE = torch.tensor([True])


def ids_of(masker, *tokens, size=49152):
    """What may follow these tokens in a single row."""
    for length in range(len(tokens) + 1):
        mask = masker.mask(torch.tensor([tokens[:length]], dtype=torch.int64), LIVE, size)
    return mask[0].nonzero().flatten().tolist()


# ---- one step


@pytest.mark.parametrize(
    "spec", ["softmax", "top-p:p=0.8", "top-k:k=7", "sparsemax:lam=2", "entmax", "bok:temperature=2,beta=0.5,lam=1"]
)
def test_draws_under_a_mask_follow_the_q_of_the_tokens_left(spec):
    g = torch.Generator().manual_seed(2)
    scores = 2 * torch.randn(60, generator=g)
    kept = sorted(torch.randperm(60, generator=g)[:25].tolist())
    # the oracle has never heard of masks: it sees the scores of the tokens left, and nothing else
    q = torch.zeros(60).index_put((torch.tensor(kept),), decoder(spec).distribution(scores[kept]))
    n = 4000
    processor = DecoderProcessor(spec, seeds=range(n), masks=[TokenSets(lambda row, written: kept)])
    left = processor(torch.zeros(n, 3, dtype=torch.int64), scores.expand(n, -1))
    assert chi_square(left.argmax(-1), q) > 1e-3


@pytest.mark.parametrize("name", decoders())
def test_every_decoder_solves_its_problem_on_the_tokens_left(name):
    g = torch.Generator().manual_seed(4)
    scores, other = 2 * torch.randn(3, 90, generator=g).double(), torch.randn(3, 90, generator=g).double()
    mask = torch.zeros(90, dtype=torch.bool).scatter(0, torch.randperm(90, generator=g)[:40], True)
    around, needs = {"seeds": torch.tensor([1, 2, 3]), "step": 5}, decoders()[name].needs
    q = decoder(name).distribution(scores, Context(**around, **dict.fromkeys(needs, other), mask=mask))
    few = Context(**around, **dict.fromkeys(needs, other[:, mask]))
    torch.testing.assert_close(q[:, mask], decoder(name).distribution(scores[:, mask], few), atol=1e-8, rtol=1e-6)
    assert (q[:, ~mask] == 0).all()


def test_maskers_are_and_ed_and_dead_ends_are_named():
    written, live = torch.zeros(2, 0, dtype=torch.int64), torch.tensor([True, True])
    low, high = TokenSets(lambda row, _: range(4)), TokenSets(lambda row, _: range(2 + row, 8))
    free = TokenSets(lambda row, _: None)
    found = allowed([low, high, free], written, live, 10)
    assert [row.nonzero().flatten().tolist() for row in found] == [[2, 3], [3]]
    assert allowed([], written, live, 10) is None
    far = TokenSets(lambda row, _: [9] if row else [0])
    with pytest.raises(ValueError, match=r"row 1: TokenSets, TokenSets together allow no token after 0"):
        allowed([low, far], written, live, 10)
    with pytest.raises(ValueError, match=r"rows 0, 1: TokenSets allows no token"):
        allowed([TokenSets(lambda row, _: [])], written, live, 10)
    with pytest.raises(ValueError, match=r"token ids must be in \[0, 10\), got 10"):
        allowed([TokenSets(lambda row, _: [10])], written, live, 10)

    class Odd:
        def __init__(self, mask):
            self.given = mask

        def mask(self, written, live, size):
            return self.given

    assert allowed([Odd(None)], written, live, 10) is None
    dead = torch.tensor([[True] * 10, [False] * 10])  # nobody looks at a row that has ended
    assert allowed([Odd(dead)], written, torch.tensor([True, False]), 10).all()
    narrow = allowed([Odd(torch.tensor([True, True, False]))], written, live, 10)  # fewer tokens than scores
    assert narrow.sum(-1).tolist() == [2, 2]
    for bad in (torch.ones(10), torch.ones(3, 10, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"Odd: a mask must be bool \[2, 10\]"):
            allowed([Odd(bad)], written, live, 10)


def test_rows_keep_their_own_state_and_drop_it_when_they_end():
    class Count(RowMasker):
        """Sums what it reads."""

        def begin(self):
            return 0

        def follow(self, state, token):
            return None if token == 9 else state + token

        def masks(self, size):
            return torch.ones(len(self.states), size, dtype=torch.bool)

    masker, text = Count(), torch.tensor([[1, 2, 3], [4, 9, 7], [5, 0, 0]])
    lives = [[True] * 3, [True] * 3, [True, True, False], [True, True, False]]
    seen = []
    for length, live in enumerate(lives):
        masker.mask(text[:, :length], torch.tensor(live), 10)
        seen.append(list(masker.states))
    assert seen == [[0, 0, 0], [1, 4, 5], [3, None, None], [6, None, None]]
    masker.mask(text[:, :0], torch.tensor([True] * 3), 10)
    assert masker.states == [0, 0, 0]
    masker.mask(text[:2, :3], torch.tensor([True] * 2), 10)  # picked up in the middle
    assert masker.states == [6, None]


# ---- grammars


def test_a_grammar_says_what_may_follow_and_ends(smollm):
    tokenizer, end = smollm.tokenizer, smollm.tokenizer.eos_token_id
    masker = Grammar.regex(tokenizer, "(yes|no)!?")
    assert {tokenizer.decode([i]) for i in ids_of(masker)} == {"yes", "no", "y", "ye", "n"}
    no, mark = (tokenizer(word)["input_ids"] for word in ("no", "!"))
    assert set(ids_of(masker, *no)) == {*mark, end}
    assert ids_of(masker, *no, *mark) == [end]
    ids_of(masker, *no, end)
    assert masker.states == [None]
    both = Grammar.regex(tokenizer, "no", [0, end])
    assert set(ids_of(both, *no)) == {0, end}
    lark = Grammar.lark(tokenizer, 'start: "(" start ")" | "x"')
    deep = [token for piece in "((x))" for token in tokenizer(piece)["input_ids"]]
    assert ids_of(lark, *deep) == [end]
    with pytest.raises(ValueError, match="does not allow the token"):
        ids_of(lark, *mark)


def test_grammars_that_cannot_be_used_are_refused(smollm):
    tokenizer = smollm.tokenizer
    for make, says in (
        (lambda: Grammar.regex(tokenizer, "(a"), "the grammar cannot be used"),
        (lambda: Grammar.lark(tokenizer, "begin: 1"), "the grammar cannot be used"),
        (lambda: Grammar.json_schema(tokenizer, {"type": "objct"}), "the grammar cannot be used"),
        (lambda: Grammar.json_schema(tokenizer, {"type": "array", "uniqueItems": True}), "the grammar cannot be used"),
        (lambda: Grammar.json_schema(tokenizer, ["no"]), "a JSON schema is an object"),  # pyright: ignore
    ):
        with pytest.raises(ValueError, match=says):
            make()


def samples_under_the_schema(smollm, n, decoder_spec):
    inputs = smollm.encode(["Describe a person in JSON."])
    masks = [Grammar.json_schema(smollm.tokenizer, SCHEMA, smollm.ends)]
    found = generate(
        smollm.model, inputs["input_ids"], decoder_spec, n, 90, [n],
        attention_mask=inputs["attention_mask"], masks=masks,
    )  # fmt: skip
    texts = [smollm.text(row) for row, done in zip(found.tokens, found.finished, strict=True) if done]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    return texts


def test_json_under_a_schema_parses_and_validates(smollm):
    texts = samples_under_the_schema(smollm, 20, "softmax:temperature=1.2")
    assert len(texts) == 20
    assert len(set(texts)) > 15  # the samples are free where the schema is
    assert len(samples_under_the_schema(smollm, 4, "bok:temperature=1.2")) == 4


@pytest.mark.slow
def test_two_hundred_samples_parse_and_validate(smollm):
    texts = samples_under_the_schema(smollm, 200, "softmax:temperature=1.2")
    assert len(texts) == 200
    assert len(set(texts)) > 150


# ---- banned strings


def test_the_automaton_finds_words_inside_words():
    words = ["ababc", "abcab", "ca"]
    table, complete = (part.tolist() for part in automaton([word.encode() for word in words]))
    for letters in itertools.product("abc", repeat=8):
        text, state = "".join(letters), 0
        for end, letter in enumerate(text, 1):
            state = table[state][ord(letter)]
            assert complete[state] == text[:end].endswith(tuple(words))


@pytest.mark.parametrize("banned", [["the", "t\0"], ["é", "日本"], ["aab", "ab a", " "], ["\n\n", "Once", "té"]])
def test_a_token_is_forbidden_exactly_where_it_would_complete_a_string(smollm, banned):
    masker, tokenizer = BannedStrings(smollm.tokenizer, banned), smollm.tokenizer
    hit = lambda ids: any(word in tokenizer.decode(ids, skip_special_tokens=True) for word in banned)  # noqa: E731
    parts = ["t", "th", "he", "On", "ce", "\n", "a", "ab", "日", "é", "caf", " upon"]
    # some characters are cut into several tokens, and a special token in the middle is not seen
    pieces = [3, *(i for part in parts for i in tokenizer(part)["input_ids"])]
    assert len(pieces) > len(parts) + 2
    g = torch.Generator().manual_seed(1)
    tried = caught = 0
    for _ in range(80):
        written = [pieces[i] for i in torch.randint(len(pieces), (4,), generator=g).tolist()]
        while hit(written):
            written.pop()
        left = set(ids_of(masker, *written))
        probes = [*pieces, *torch.randint(49152, (40,), generator=g).tolist()]
        for token in probes:
            assert (token in left) == (not hit([*written, token])), (tokenizer.decode(written), tokenizer.decode(token))
            tried += 1
            caught += token not in left
    assert tried > 3000
    assert caught > 5


def test_banned_strings_do_not_appear_however_they_are_cut(smollm):
    inputs = smollm.encode(["Tell me about the sea."])
    arguments = {"n": 8, "max_new_tokens": 16, "seeds": [1], "attention_mask": inputs["attention_mask"]}
    free = generate(smollm.model, inputs["input_ids"], "softmax:temperature=0.7", **arguments)
    banned = ["the", "sea", "s "]
    assert all(any(word in smollm.text(row) for row in free.tokens) for word in banned)
    masks = [BannedStrings(smollm.tokenizer, banned)]
    found = generate(smollm.model, inputs["input_ids"], "softmax:temperature=0.7", masks=masks, **arguments)
    for row in found.tokens:
        assert not any(word in smollm.text(row) for word in banned)
    assert not torch.equal(found.tokens, free.tokens)


def test_strings_that_cannot_be_banned(smollm):
    for strings in ([], [""], "the", ["a\ufffd"], [7]):
        with pytest.raises(ValueError, match="banned strings"):
            BannedStrings(smollm.tokenizer, strings)  # pyright: ignore


# ---- in transformers


def tiny():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_masks_by_row_and_step_and_the_end_of_rows():
    asked = []

    def choose(row, written):
        asked.append((row, len(written)))
        ends = {0: 1, 1: 3, 2: 4}[row]
        return [2] if len(written) == ends else [10 + row + len(written)]

    ids = torch.tensor([[5], [6], [7]])
    found = generate(tiny(), ids, "softmax", 1, 8, [1, 2, 3], masks=[TokenSets(choose)])
    assert found.tokens.tolist() == [[10, 2, 0, 0, 0], [11, 12, 13, 2, 0], [12, 13, 14, 15, 2]]
    assert found.lengths.tolist() == [2, 4, 5]
    assert (0, 2) not in asked  # a row that has ended is not asked about
    assert (2, 4) in asked
    sampling = Sampling("greedy", masks=[TokenSets(lambda row, written: [20 + len(written)])])
    rows = tiny().generate(ids, custom_generate=sampling, max_new_tokens=3, eos_token_id=None)
    assert rows[:, 1:].tolist() == [[20, 21, 22]] * 3


def test_a_dead_end_is_an_error():
    with pytest.raises(ValueError, match=r"row 1: TokenSets allows no token after 2 written ones: a dead end"):
        generate(
            tiny(), torch.tensor([[5], [6]]), "softmax", 1, 8, [1, 2],
            masks=[TokenSets(lambda row, written: [] if row and len(written) == 2 else [7])],
        )  # fmt: skip


def test_traces_are_those_of_the_masked_q():
    found = generate(
        tiny(), torch.tensor([[5]]), "softmax", 4, 5, [1], trace=True, eos_token_id=None,
        masks=[TokenSets(lambda row, written: [7, 8])],
    )  # fmt: skip
    assert set(found.tokens.unique().tolist()) == {7, 8}
    assert (found.entropy > 0.3).all()  # two tokens share all mass
    assert (found.log_q > found.log_p + 1).all()


# ---- on the command line


def test_the_command_line(run, smollm, tmp_path):  # noqa: F811
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    arguments = ("generate", "Describe a person in JSON.", "--seed", "2", "--max-tokens", "90")
    code, out, _ = run(*arguments, "--json-schema", str(file), "--decoder", "top-p:p=0.95")
    assert code == 0
    jsonschema.validate(json.loads(out), SCHEMA)
    code, out, _ = run(*arguments[:4], "--max-tokens", "12", "--ban", "person", "--ban", "e ", "-n", "3")
    assert code == 0
    assert "person" not in out
    assert "e " not in out
    file.write_text("{")
    for extra, says in (
        (("--json-schema", str(file)), "is not JSON"),
        (("--json-schema", "/nowhere.json"), "cannot read /nowhere.json"),
        (("--ban", ""), "none of them empty"),
    ):
        code, _, err = run(*arguments, *extra)
        assert code == 2
        assert says in err
    file.write_text('{"type": "objct"}')
    code, _, err = run(*arguments, "--json-schema", str(file))
    assert code == 2
    assert "the grammar cannot be used" in err
