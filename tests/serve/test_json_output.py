"""`response_format`: what a random model writes is JSON, and valid against the schema, by OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import numpy as np
import openai
import pytest
import torch
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from oncurve.engines.native.session import torch_session
from oncurve.models.loading.load import build_model, build_tokenizer
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import TinyModel
from oncurve.serve.json_grammar import JsonConstraint, JsonGrammars
from tests.engines.native.plain import next_logits
from tests.serve.serving import MODEL, TEMPLATE, Endpoint, chatting_policy, endpoint

PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"
MESSAGES: Any = [{"role": "user", "content": "write JSON"}]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, as most models have it: tokens of several characters, and characters of several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = ['{"name": "red", "size": 12, "tags": ["a", "b"], "ok": true}', "the blue é null false"] * 9
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<end>"])
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def random_model(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Random weights. Some rows of the embedding have no token, as in many models."""
    shape = TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=48, context=512)
    model = build_model(shape, tokenizer, 0)
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer) + 11)
    return model


def random_policy(tokenizer: PreTrainedTokenizerBase) -> Policy:
    tokenizer.chat_template = TEMPLATE
    return Policy(random_model(tokenizer), tokenizer)


@pytest.fixture(scope="module", params=["characters", "bytes"])
def served(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    tokenizer = build_tokenizer(PRINTABLE) if request.param == "characters" else byte_tokenizer()
    with endpoint(random_policy(tokenizer), slots=12) as server:
        yield server


def response_format(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SHORT = {"type": "string", "maxLength": 6}
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": closed(name=SHORT, size={"type": "integer"}, ok={"type": "boolean"}),
    "enum": closed(colour={"enum": ["red", "blue", 3, None]}, kind={"const": "a b"}),
    "nested": closed(outer=closed(inner=closed(x={"type": "null"})), y={"type": "boolean"}),
    "array": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 40}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [SHORT, {"type": "boolean"}], "items": False, "minItems": 2},
    "numbers": closed(p={"type": "number", "minimum": 0, "maximum": 1}, n={"type": "integer", "exclusiveMinimum": 7}),
    "optional": {"type": "object", "properties": {"a": SHORT, "b": {"type": "integer"}}, "required": ["b"]},
    "extra": {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}},
    "union": {"anyOf": [closed(kind={"const": "x"}), {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}]},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,5}-[0-9]+$"},
    "names": closed(**{'a"b\\c/d': {"type": "boolean"}, "a b": {"type": "null"}}),
    "recursive": {
        "$defs": {"tree": closed(value={"type": "integer"}, children={"type": "array", "items": {"$ref": "#/$defs/tree"}})},
        "$ref": "#/$defs/tree",
    },
}


def test_every_complete_text_is_valid(served: Endpoint) -> None:
    def ask(schema: dict[str, Any]) -> list[str]:
        with served.client() as client:
            response = client.chat.completions.create(
                model=MODEL, messages=MESSAGES, response_format=response_format(schema), n=4, seed=3, max_tokens=100
            )
        return [choice.message.content or "" for choice in response.choices if choice.finish_reason == "stop"]

    with ThreadPoolExecutor(len(SCHEMAS)) as threads:
        complete = dict(zip(SCHEMAS, threads.map(ask, SCHEMAS.values()), strict=True))
    assert all(complete.values()), [name for name, texts in complete.items() if not texts]
    for name, texts in complete.items():
        for text in texts:
            Draft202012Validator(SCHEMAS[name]).validate(json.loads(text))


def test_any_object(served: Endpoint) -> None:
    with served.client() as client:
        response = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_format={"type": "json_object"}, n=12, seed=0, max_tokens=60
        )
    complete = [choice.message.content or "" for choice in response.choices if choice.finish_reason == "stop"]
    assert complete
    assert all(isinstance(json.loads(text), dict) for text in complete)
    assert len(set(complete)) > 1


class Point(BaseModel):
    colour: Literal["red", "blue"]
    x: Annotated[int, Field(ge=0, le=99)]
    corners: Annotated[list[bool], Field(max_length=2)]


def test_the_client_parses_a_model(served: Endpoint) -> None:
    with served.client() as client:
        response = client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=Point, n=6, seed=1, max_tokens=80, temperature=0.7
        )
    assert all(isinstance(choice.message.parsed, Point) for choice in response.choices)


def test_the_same_seed_gives_the_same_text_whatever_else_is_requested(served: Endpoint) -> None:
    """With and without a schema, at the same settings, among others."""

    def ask(number: int) -> tuple[str, Any]:
        constrained: Any = {"response_format": response_format(SCHEMAS["flat"])} if number % 2 else {}
        with served.client() as client:
            response = client.chat.completions.create(
                model=MODEL, messages=MESSAGES, seed=number, max_tokens=20, logprobs=True, top_p=0.95, **constrained
            )
        choice = response.choices[0]
        assert choice.logprobs is not None
        return choice.message.content or "", [token.logprob for token in choice.logprobs.content or ()]

    alone = [ask(number) for number in range(4)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, [number % 4 for number in range(8)])) == [alone[number % 4] for number in range(8)]


def test_log_probs_are_those_of_the_model_itself(served: Endpoint) -> None:
    with served.client() as client:
        response = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_format=response_format(SCHEMAS["flat"]), seed=5, max_tokens=20,
            logprobs=True, temperature=0.5,
        )  # fmt: skip
    (choice,) = response.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    ids = np.array([token.model_extra["token_id"] for token in choice.logprobs.content if token.model_extra])
    prompt = np.array(served.policy.tokenizer("u write JSON\na ")["input_ids"])
    logps_TV = next_logits(random_model(served.policy.tokenizer), prompt, ids).log_softmax(-1)
    reported = [token.logprob for token in choice.logprobs.content]
    assert reported == pytest.approx(logps_TV[range(len(ids)), ids].tolist(), abs=1e-3)


def test_a_stream_is_the_same_text(served: Endpoint) -> None:
    request: Any = {
        "model": MODEL, "messages": MESSAGES, "response_format": response_format(SCHEMAS["array"]), "seed": 2, "max_tokens": 60,
    }  # fmt: skip
    with served.client() as client:
        complete = client.chat.completions.create(**request).choices[0].message.content
        chunks = client.chat.completions.create(**request, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == complete


BAD: list[tuple[dict[str, Any], str]] = [
    ({"type": "strin"}, "strin"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"not": {"type": "string"}}, "not"),
    ({"$ref": "#/$defs/none"}, "none"),
    ({"$ref": "https://example.com/schema"}, "example.com"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5)"),
    ({"type": "string", "pattern": "("}, "unclosed group"),
    ({"type": "object", "minProperties": 2}, "same key twice"),
    ({"type": "integer", "enum": [1, 10**20]}, "100000000000000000000"),
    ({"const": 2**53 + 1}, "2^53"),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum of 0"),
    ({"allOf": [{"type": "number", "exclusiveMaximum": -1}, {"minimum": -1.5}]}, "exclusiveMaximum of -1"),
    ({"const": "a\u0001"}, "control character"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "not"),
    ({"$ref": "#"}, "NoExtensionBias"),
]


@pytest.mark.parametrize(("schema", "reason"), BAD)
def test_schemas_that_are_not_supported_are_refused_with_the_reason(served: Endpoint, schema: Any, reason: str) -> None:
    with served.client() as client, pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=response_format(schema))
    assert error.value.param == "response_format"
    assert reason in error.value.message


def allows(schema: dict[str, Any], text: str) -> bool:
    policy = random_policy(build_tokenizer(PRINTABLE))
    constraint = JsonGrammars(policy).compile(schema).start()
    for token_id in policy.tokenizer(text, add_special_tokens=False)["input_ids"]:
        if not constraint.allowed()[token_id]:
            return False
        constraint.accept(token_id)
    return True


def test_a_key_cannot_be_spelled_in_two_ways() -> None:
    """A second `a`, written with escapes, would replace the first one."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    assert allows(schema, '{"a":"x","b":5,"c\\n":"\\"\\\\"}')
    assert not allows(schema, r'{"a":"x","\u0061":5}')
    assert not allows({"type": "object", "patternProperties": {"^a": {"type": "string"}}}, r'{"\u0061":5}')


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.5, 1), (0, 10), (-1, -0.5)])
def test_an_excluded_bound_is_not_allowed(low: float, high: float) -> None:
    policy = random_policy(build_tokenizer(PRINTABLE))
    constraint = JsonGrammars(policy).compile({"type": "number", "exclusiveMinimum": low, "maximum": high}).start()
    for token_id in policy.tokenizer(f"{low}", add_special_tokens=False)["input_ids"]:
        constraint.accept(token_id)
    assert constraint.error is not None or not constraint.allowed()[policy.eos_ids[0]]


def test_a_schema_with_a_thousand_optional_properties(served: Endpoint) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(1000)}, "additionalProperties": False}
    with served.client() as client:
        choice = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_format=response_format(schema), seed=0, max_tokens=60
        ).choices[0]
    assert (choice.message.content or "").startswith(('{"p', "{}"))


def test_a_schema_and_tools_are_refused(served: Endpoint) -> None:
    tools: Any = [{"type": "function", "function": {"name": "add"}}]
    with served.client() as client, pytest.raises(openai.BadRequestError, match="leave either out"):
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=tools, response_format=response_format({"type": "object"})
        )


def test_a_vocabulary_that_cant_write_json_is_refused() -> None:
    with endpoint(chatting_policy()) as server, server.client() as client:
        with pytest.raises(openai.BadRequestError, match="the model's vocabulary can't write"):
            client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format={"type": "json_object"})
        assert client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format={"type": "text"}, max_tokens=3)


def test_a_character_that_the_vocabulary_lacks_is_refused(served: Endpoint) -> None:
    request: Any = {"model": MODEL, "messages": MESSAGES, "response_format": response_format({"const": "é"}), "max_tokens": 20}
    with served.client() as client:
        if len(served.policy.tokenizer) > 200:  # bytes write everything
            assert json.loads(client.chat.completions.create(**request).choices[0].message.content or "") == "é"
        else:
            with pytest.raises(openai.BadRequestError, match="'é'"):
                client.chat.completions.create(**request)


def test_a_failing_constraint_ends_its_request_alone(served: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    accept = JsonConstraint.accept

    def fail(self: JsonConstraint, token_id: int) -> None:
        accept(self, token_id)
        self.error = "out of fuel"

    def ask() -> str:
        with served.client() as client:
            return (
                client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1, max_tokens=100)
                .choices[0]
                .message.content
                or ""
            )

    alone = ask()
    monkeypatch.setattr(JsonConstraint, "accept", fail)
    with ThreadPoolExecutor(1) as threads, served.client() as client:
        other = threads.submit(ask)
        with pytest.raises(openai.InternalServerError, match="out of fuel"):
            client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format={"type": "json_object"}, n=3)
        assert other.result() == alone
    assert not served.engine.session.requests


def test_drafts_keep_to_the_schema() -> None:
    """A slot with several rows drafts nothing while it has a constraint."""
    policy = random_policy(build_tokenizer(PRINTABLE))
    with endpoint(policy, session=torch_session(policy, 4, 200, "own")) as server, server.client() as client:
        response = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": '{"colour": "red", "kind": "a b"} ' * 4}],
            response_format=response_format(SCHEMAS["enum"]), n=4, seed=1, max_tokens=100,
        )  # fmt: skip
    for choice in response.choices:
        assert choice.finish_reason == "stop"
        Draft202012Validator(SCHEMAS["enum"]).validate(json.loads(choice.message.content or ""))


def pieces_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece has it: `▁` for a space, and single bytes for characters that no token has."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *map(chr, range(33, 127)),
        "▁t",
        '":',
        '▁"',
    ]
    merges = [("▁", "t"), ('"', ":"), ("▁", '"')]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_tokens_of_pieces_write_valid_texts_too() -> None:
    """Any choice among the allowed tokens leads to a valid text."""
    policy, rng = random_policy(pieces_tokenizer()), np.random.default_rng(0)
    grammars, complete = JsonGrammars(policy), 0
    for schema in (*SCHEMAS.values(), {"const": "né"}):
        constraint, ids = grammars.compile(schema).start(), list[int]()
        while len(ids) < 300 and not (ids and ids[-1] in policy.eos_ids):
            ids.append(int(rng.choice(np.flatnonzero(constraint.allowed()))))
            constraint.accept(ids[-1])
            assert constraint.error is None
        if ids[-1] in policy.eos_ids:
            text = policy.tokenizer.decode(ids, skip_special_tokens=True)
            Draft202012Validator(schema).validate(json.loads(text))
            complete += 1
    assert complete > len(SCHEMAS) // 2
