"""Rewards that a recipe names."""

from pathlib import Path
from typing import Any

import pytest

from oncurve.errors import OncurveError
from oncurve.recipe.schema.sections import Reward, Task
from oncurve.rewards.registry import REWARDS, build_rewards
from oncurve.tasks.registry import build_task
from tests.rewards.builders import group


def build(*configs: dict[str, Any], **context: Any) -> Any:
    return build_rewards([Reward.model_validate(config) for config in configs], **context)


def test_names_weights_and_options() -> None:
    mix = build({"type": "answer", "take": "number"}, {"type": "format", "name": "shape", "weight": 0.2, "style": "soft"})
    (scored,) = mix.score([group("it is 46", answer="46")])
    assert [(a.name, a.value, a.weight) for a in scored.scored[0].aspects] == [("answer", 1.0, 1.0), ("shape", 0.0, 0.2)]


def test_overlong_knows_the_stage_s_limit() -> None:
    mix = build({"type": "overlong", "buffer": 2}, max_new_tokens=4)
    (scored,) = mix.score([group("ab", "abc", "abcd")])
    assert scored.totals == (0.0, -0.5, -1.0)
    mix = build({"type": "overlong", "buffer": 2, "limit": 3}, max_new_tokens=4)
    (scored,) = mix.score([group("ab")])
    assert scored.totals == (-0.5,)


def test_python(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def scaled(completion, by):\n    return by * len(completion)\n")
    mix = build({"type": "python", "function": f"{tmp_path}/mine.py:scaled", "arguments": {"by": 0.5}})
    (scored,) = mix.score([group("abcd")])
    assert scored.totals == (2.0,)


@pytest.mark.parametrize(
    ("config", "where", "hint"),
    [
        ({"type": "anser"}, "rewards.anser.type", "did you mean 'answer'?"),
        ({"type": "answer", "takes": "tag"}, "rewards.answer.takes", "did you mean 'take'?"),
        ({"type": "answer", "name": "gold", "take": "tags"}, "rewards.gold.take", "one of tag, boxed, hashes"),
        ({"type": "format", "pattern": "("}, "rewards.format.pattern", "not a valid regular expression"),
        ({"type": "overlong", "buffer": 3}, "rewards.overlong.limit", "missing"),
        ({"type": "overlong", "buffer": 3, "limit": 2}, "rewards.overlong", "above the limit"),
        ({"type": "countdown", "closeness": 1}, "rewards.countdown", "must stay below 1"),
        ({"type": "python", "function": "nothing"}, "rewards.python.function", "not written as"),
    ],
)
def test_errors_name_the_key_and_the_fix(config: dict[str, Any], where: str, hint: str) -> None:
    with pytest.raises(OncurveError) as caught:
        build(config)
    assert caught.value.where == where
    assert hint in str(caught.value)


def test_every_option_is_documented() -> None:
    for kind in REWARDS.values():
        assert all(field.description for field in kind.options.model_fields.values())


@pytest.mark.parametrize("kind", ["arithmetic", "countdown"])
def test_demonstrations_are_correct_by_the_task_s_default_rewards(kind: str) -> None:
    task = build_task(Task.model_validate({"type": kind, "heldout": 20, "examples": 30}))
    mix = build_rewards([*task.default_rewards, Reward(type="format")])
    for example in task.examples:
        (scored,) = mix.score([group(example.completion, **example.prompt.columns)])
        assert mix.is_correct(scored.scored[0])
        assert scored.totals == (2.0,)
