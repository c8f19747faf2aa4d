"""JSON and JSON Schema, with texts that break parsers."""

import json
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from oncurve.errors import RecipeError
from oncurve.rewards.style.json_schema import JsonOptions, JsonReward
from tests.rewards.builders import aspects, values


def reward(**options: Any) -> JsonReward:
    return JsonReward("json", 1.0, JsonOptions(**options))


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "patternProperties": {"^x_": {"type": "number"}},
}


def test_valid_json() -> None:
    texts = ['{"a": [1, 2.5, null]}', "7", "{'a': 1}", "NaN", "[Infinity]", "", "[" * 100_000, '{"a": 1} and more']
    assert values(reward(), *texts) == [1.0, 1.0] + [0.0] * 6


def test_where_it_is_taken_from() -> None:
    assert values(reward(), "<think>{</think>I say <answer>[1]</answer>", "Here:\n```json\n[1]\n```\nDone.") == [1.0, 1.0]
    assert values(reward(take="fence"), "[1]") == [0.0]
    assert values(reward(take="all"), "<answer>[1]</answer>") == [0.0]


def test_against_a_schema(tmp_path: Path) -> None:
    texts = ['{"name": "Ann", "age": 3, "x_a": 1}', '{"age": 3}', '{"name": "ann"}', '{"name": "A", "age": -1}', "[]"]
    found = aspects(reward(rules=PERSON), *texts, '{"name": "A", "x_a": "1"}')
    assert [a.value for a in found] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert [a.reason for a in found][1:4] == [
        "$: 'name' is a required property",
        "$.name: it does not match '^[A-Z]'",
        "$.age: -1 is less than the minimum of 0",
    ]
    (tmp_path / "schema.json").write_text('{"type": "array"}')
    assert values(reward(schema_file=str(tmp_path / "schema.json")), "[]", "{}") == [1.0, 0.0]


def test_a_pattern_that_backtracks_is_stopped() -> None:
    (aspect,) = aspects(reward(rules={"pattern": "^(a|a)*$"}), '"' + "a" * 60 + 'b"')
    assert aspect.failure is not None
    assert "took more than 0.2 s" in aspect.failure


def test_unique_items() -> None:
    """As jsonschema decides, but in linear time: pairs of items that can't be sorted took minutes."""
    texts = [
        "[1, 2]",
        "[1, 1.0]",
        "[1, true]",
        "[0, false]",
        '[{"a": 1, "b": [2]}, {"b": [2], "a": 1.0}]',
        '["1", 1]',
        "[[], {}]",
    ]
    texts += ["[[1], [true]]", "[null, null]", "5"]
    schema = {"uniqueItems": True}
    expected = [float(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))) for text in texts]
    assert values(reward(rules=schema), *texts) == expected == [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]
    assert values(reward(rules={"uniqueItems": False}), "[1, 1]") == [1.0]
    long = json.dumps([part for i in range(10_000) for part in ({"a": i}, i)])
    began = time.process_time()
    assert values(reward(rules=schema), long) == [1.0]
    assert time.process_time() - began < 20, "by pairs it takes minutes"


def test_schemas_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    for options in (
        {"rules": {"type": "nothing"}},
        {"schema_file": "/none.json"},
        {"schema_file": str(tmp_path / "list.json")},
    ):
        with pytest.raises(RecipeError):
            reward(**options)


def test_nothing_is_fetched() -> None:
    (aspect,) = aspects(reward(rules={"$ref": "https://example.org/schema"}), "1")
    assert aspect.failure is not None
    assert "Unresolvable" in aspect.failure


def test_a_number_that_overflows_the_schemas_arithmetic_is_wrong() -> None:
    reward = JsonReward("json", 1.0, JsonOptions(rules={"properties": {"a": {"multipleOf": 0.5}}}))
    assert values(reward, '{"a": 1e999}', '{"a": ' + "9" * 400 + "}", '{"a": 1.5}') == [0.0, 0.0, 1.0]
