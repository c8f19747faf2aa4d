"""JSON output: a grammar that lets the engine sample only texts that are valid against a JSON schema, or one tool call.

llguidance reads the schema and says, after every token, which tokens may come next. For that it has to know the bytes of each
token, so its table of them is compared with what the model's tokenizer decodes.

Texts are on one line, with or without a space after commas and colons. If any whitespace were allowed, a model could write
whitespace forever.
"""

from __future__ import annotations

import json
import string
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import numpy as np

from oncurve.agents.tool_calls import CLOSE, OPEN
from oncurve.engines.base import TokenConstraint
from oncurve.errors import MissingPackage, ModelError, pip_install
from oncurve.models.policy import Policy
from oncurve.records import Bools

try:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer
except ModuleNotFoundError:
    LLMatcher = None

OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": 'nrbtf\\"',
}
"""Options of llguidance's compiler. They override those that a schema may contain. Without the escape \\u no key can be spelled
in two ways: `{"a": 1, "\\u0061": "x"}` has the key `a` twice, and llguidance would apply a property's schema to the first only.
"""
COMPARED = 4096
"""The most tokens whose bytes are compared with what the tokenizer decodes."""
MAX_ITEMS = 20_000
"""The most alternatives of the parser at one position: four for each optional property, and OpenAI's limit is 5,000."""
REMEMBERED = 32
"""Schemas that stay compiled."""


class SchemaError(Exception):
    """A schema that no text can be sampled for, with the reason."""


class JsonGrammars:
    """Grammars for the tokens of one model."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._lock = threading.Lock()
        self._compile = lru_cache(maxsize=REMEMBERED)(self._compile_text)

    def compile(self, schema: Mapping[str, Any]) -> JsonGrammar:
        """The grammar of a schema. Raises SchemaError."""
        return self._compile_locked("response_format", json.dumps(schema, ensure_ascii=False), False)

    def compile_calls(self, functions: Mapping[str, Mapping[str, Any]]) -> JsonGrammar:
        """The grammar of one call, in the Hermes form, of one of some functions: the schema of its arguments, by name. Raises
        SchemaError."""
        return self._compile_locked("tool_choice", json.dumps(functions, ensure_ascii=False), True)

    def _compile_locked(self, key: str, text: str, is_call: bool) -> JsonGrammar:
        if LLMatcher is None:
            raise MissingPackage(
                key, "llguidance is not installed", because="constrained sampling needs it", fix=pip_install("serve")
            )
        with self._lock:  # the first one reads the vocabulary, which takes a second
            return self._compile(text, is_call)

    def _compile_text(self, text: str, is_call: bool) -> JsonGrammar:
        """``text``: a schema or, if ``is_call``, the schemas of functions by name."""
        self._check_characters({*string.printable[:95], *text})
        _check_values(json.loads(text))
        try:
            grammar = self._call_rules(text) if is_call else LLMatcher.grammar_from_json_schema(text, overrides=OPTIONS)
            matcher = LLMatcher(
                self.tokens, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False, max_items_in_row=MAX_ITEMS)
            )
        except ValueError as error:
            raise SchemaError(str(error)) from None
        matcher.compute_bitmask()  # its first step may show that a schema is too large, or that no text is valid against it
        problems = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
        if problems:
            raise SchemaError("; ".join(" ".join(problem.replace("<non-verbose/>", "").split()) for problem in problems))
        special_V = self._special_V.copy()
        special_V[[token_id for token_id in map(self._token_of, (OPEN, CLOSE)) if is_call and token_id is not None]] = False
        return JsonGrammar(matcher, special_V)

    def _call_rules(self, schemas: str) -> str:
        """Each function has a rule for its call and one for its arguments, so that references in a schema stay within it."""
        functions = list(json.loads(schemas).items())
        calls = " | ".join(f"call_{i}" for i in range(len(functions)))
        rules = [f'start: {self._tag_rule(OPEN)} "\\n"? ({calls}) "\\n"? {self._tag_rule(CLOSE)}']
        for i, (name, schema) in enumerate(functions):
            before = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
            rules.append(f'call_{i}: {json.dumps(before, ensure_ascii=False)} arguments_{i} "}}"')
            rules.append(f"arguments_{i}: %json {json.dumps({**schema, 'x-guidance': OPTIONS}, ensure_ascii=False)}")
        return str(LLMatcher.grammar_from_lark("\n".join(rules)))

    def _tag_rule(self, tag: str) -> str:
        """A tag as llguidance matches it: by its token if it is an added one, which has no text there, else by its text."""
        token_id = self._token_of(tag)
        return tag if token_id is not None and self.tokens.is_special_token(token_id) else f'"{tag}"'

    def _token_of(self, text: str) -> int | None:
        """The token that is this text; None if there is none."""
        token_id: int | None = self.policy.tokenizer.get_vocab().get(text)
        return token_id

    @cached_property
    def tokens(self) -> LLTokenizer:
        """The vocabulary as llguidance needs it: the bytes of every token."""
        tokenizer, end = self.policy.tokenizer, list(self.policy.eos_ids)
        try:
            tokens = from_tokenizer(tokenizer, n_vocab=len(self._special_V), eos_token=end)
        except ValueError:  # neither bytes nor pieces of words: its tokens are their texts, such as those of the built-in one
            tokens = LLTokenizer(TokenizerWrapper(_TextTokens(self.policy)), eos_token=end)
        self._compare(tokens)
        return tokens

    @cached_property
    def _special_V(self) -> Bools:
        """Special tokens, which have no text in a response. Except for end tokens, no completion may have them."""
        special_V = np.zeros(self.policy.head.weight_VD.shape[0], bool)
        ids = {*self.policy.tokenizer.all_special_ids} - {*self.policy.eos_ids}
        special_V[[token_id for token_id in ids if token_id < len(special_V)]] = True
        return special_V

    def _compare(self, tokens: LLTokenizer) -> None:
        tokenizer = self.policy.tokenizer
        first = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        before = tokenizer.decode(first)
        size = min(tokens.vocab_size, len(tokenizer))
        for token_id in range(0, size, max(1, size // COMPARED)):
            if tokens.is_special_token(token_id) or token_id in tokenizer.all_special_ids:
                continue
            expected = tokens.decode_bytes([token_id]).decode("utf-8", "replace")
            text = str(tokenizer.decode([*first, token_id])).removeprefix(before)
            if "�" not in expected and text != expected:
                raise ModelError(
                    type(tokenizer).__name__,
                    f"token {token_id} is {text!r}, but {expected!r} for the JSON grammar",
                    because="this kind of tokenizer is not supported for JSON output",
                    fix="leave response_format and a required tool_choice out",
                )

    def _check_characters(self, characters: set[str]) -> None:
        """Raises SchemaError if the vocabulary lacks a character: sampling could reach a state in which no token is allowed."""
        missing = "".join(sorted(c for c in characters if self.tokens.decode_bytes(self._spell(c)) != c.encode()))
        if missing:
            raise SchemaError(f"the model's vocabulary can't write {missing!r}, which such texts may need")

    def _spell(self, character: str) -> list[int]:
        return [
            token_id for token_id in self.tokens.greedy_tokenize(character) if token_id != self.policy.tokenizer.unk_token_id
        ]


class _TextTokens:
    """A vocabulary whose tokens are their own texts, in the form that llguidance asks for."""

    def __init__(self, policy: Policy) -> None:
        self.tokenizer = policy.tokenizer
        texts = {token_id: text for text, token_id in self.tokenizer.get_vocab().items()}
        self.tokens = [texts.get(token_id, "").encode() for token_id in range(max(texts) + 1)]
        self.eos_token_id, self.bos_token_id = policy.eos_ids[0], self.tokenizer.bos_token_id
        self.special_token_ids = [token_id for token_id in self.tokenizer.all_special_ids if token_id < len(self.tokens)]

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode() if isinstance(text, bytes) else text
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True, slots=True)
class JsonGrammar:
    """A compiled schema, and the tokens that are never allowed."""

    matcher: LLMatcher
    special_V: Bools

    def start(self) -> TokenConstraint:
        return JsonConstraint(self.matcher.deep_copy(), self.special_V)


@dataclass(slots=True)
class JsonConstraint:
    """The state of one completion in its grammar."""

    matcher: LLMatcher
    special_V: Bools
    error: str | None = field(default=None, init=False)

    def allowed(self) -> Bools:
        bits = np.unpackbits(np.frombuffer(self.matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed_V = np.zeros(len(self.special_V), bool)
        allowed_V[: len(bits)] = bits[: len(allowed_V)]
        allowed_V &= ~self.special_V
        if self.matcher.is_error() or not allowed_V.any():
            self.error = self.matcher.get_error() or "no token of the vocabulary may come next"
            allowed_V[:] = True
        return allowed_V

    def accept(self, token_id: int) -> None:
        if self.error is None and not self.matcher.consume_token(token_id):
            self.error = self.matcher.get_error()


def _check_values(schema: Any) -> None:
    """Refuses what llguidance accepts and does not enforce, or can't write without the escape \\u."""
    bounds: dict[str, set[float]] = {}
    for key, value in _walk(schema):
        for text in (key, value):
            if isinstance(text, str) and any(character < " " and character not in "\n\r\b\t\f" for character in text):
                raise SchemaError(f"{text!r} has a control character, which is not supported")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if abs(value) > 2**53:
            raise SchemaError(f"the number {value} is not supported: numbers must be from -2^53 to 2^53")
        if key == "minProperties" and value > 1:
            raise SchemaError("minProperties above 1 is not supported, as a text may have the same key twice")
        bounds.setdefault(key, set()).add(value)
    for side, other, sign in (("Minimum", "Maximum", 1), ("Maximum", "Minimum", -1)):
        opposite = bounds.get(f"exclusive{other}", set()) | bounds.get(other.lower(), set())
        for bound, end in product(bounds.get(f"exclusive{side}", ()), opposite):
            if bound * sign >= 0 and bound == int(bound) and 0 < (end - bound) * sign < 1:  # it would allow the bound itself
                raise SchemaError(f"exclusive{side} of {bound} with a bound of {end} on the other side is not supported")


def _walk(schema: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """All values of a schema, each with the key of the object that it is in, or that its list is in."""
    yield key, schema
    if isinstance(schema, dict):
        for name, value in schema.items():
            yield from _walk(value, name)
    elif isinstance(schema, list):
        for value in schema:
            yield from _walk(value, key)
