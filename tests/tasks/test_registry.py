"""A recipe's task section is checked against the task that it names."""

from __future__ import annotations

import pytest

from oncurve.errors import RecipeError
from oncurve.recipe.schema.sections import Task
from oncurve.tasks.registry import TASKS, build_task


def test_a_key_of_another_task_names_the_tasks_that_have_it() -> None:
    with pytest.raises(RecipeError) as refused:
        build_task(Task.model_validate({"type": "arithmetic", "chat": True}))
    assert refused.value.because == "the task arithmetic has no key 'chat'"
    having = [name for name, task in TASKS.items() if "chat" in task.options.model_fields]
    assert "file" in having
    assert "arithmetic" not in having
    assert refused.value.fix == f"remove it, or use a task that has it: {', '.join(having)}"


def test_a_key_of_no_task_is_refused_with_the_closest_one() -> None:
    with pytest.raises(RecipeError, match="did you mean 'digits'"):
        build_task(Task.model_validate({"type": "arithmetic", "digit": 2}))
