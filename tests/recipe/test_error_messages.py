"""Every mistake in a recipe gives one error: the key, its value, the reason, and what to write instead."""

from __future__ import annotations

import tomllib

import pytest
from pydantic import PositiveInt

from oncurve.errors import RecipeError
from oncurve.recipe.error_messages import read_section
from oncurve.recipe.schema.base import Section

from .recipes import base, refusal

WRONG = [
    ("grpo.group_szie=16", "grpo.group_szie", "did you mean 'group_size'"),
    ("grpo.kl.betta=0.1", "grpo.kl.betta", "write beta"),
    ("model.dtpye=float32", "model.dtpye", "did you mean 'dtype'"),
    ("zzz=1", "zzz", "the keys here are name, seed, model"),
    ("learning_rate=1", "learning_rate", "sft.optimiser.learning_rate or grpo.optimiser.learning_rate"),
    ("grpo.learning_rate=1", "grpo.learning_rate", "write it as grpo.optimiser.learning_rate"),
    ("grpo.temperature=1", "grpo.temperature", "write it as grpo.sampling.temperature"),
    ("grpo.seed=1", "grpo.seed", "above the first [section]"),
    ("grpo.num_generations=4", "grpo.num_generations", "TRL's num_generations is grpo.group_size"),
    ("grpo.gradient_accumulation_steps=4", "grpo.gradient_accumulation_steps", "is grpo.prompts_per_step here (TRL's default"),
    ("grpo.repetition_penalty=1.1", "grpo.repetition_penalty", "would no longer be the learner's policy"),
    ("grpo.max_prompt_length=64", "grpo.max_prompt_length", "prompts are never truncated"),
    ("grpo.group_size=0", "grpo.group_size", "use 1 or more (the default is 8)"),
    ("grpo.group_size='8'", "grpo.group_size", "write group_size = 8, without quotes"),
    ("grpo.group_size=8.0", "grpo.group_size", "write group_size = 8"),
    ("grpo.group_size=8.5", "grpo.group_size", "takes an integer, 1 or more"),
    ("grpo.group_size=true", "grpo.group_size", "takes an integer, 1 or more"),
    ("grpo.group_size=many", "grpo.group_size", "group_size = 8"),
    ("grpo.objective=gpro", "grpo.objective", 'did you mean objective = "grpo"'),
    ("grpo.objective=sac", "grpo.objective", 'the default is "grpo"'),
    ("grpo.advantage.scale=std", "grpo.advantage.scale", "one of group, batch, whiten, mean, signal_share, per_reward, none"),
    ("model.dtype=bf16", "model.dtype", 'did you mean dtype = "bfloat16"'),
    ("grpo.optimiser.betas=[0.9]", "grpo.optimiser.betas", "a list of 2, each a number"),
    ("grpo.optimiser.betas=[0.9, 2]", "grpo.optimiser.betas", "[0.9, 0.999]"),
    ("grpo.optimiser.betas=0.9", "grpo.optimiser.betas", "a list of 2"),
    ("grpo.mask_cut=True", "grpo.mask_cut", "write mask_cut = true, in lower case"),
    ("grpo.mask_cut=1", "grpo.mask_cut", "write mask_cut = true"),
    ("grpo.mask_cut=maybe", "grpo.mask_cut", "takes true or false"),
    ("name=5", "name", "--set: 'name=\"5\"'"),
    ("rewards.answer.weight=heavy", "rewards.answer.weight", "takes a number"),
    ("rewards.answer.weight=nan", "rewards.answer.weight", "a finite one"),
    ("grpo.sampling.stop=abc", "grpo.sampling.stop", 'write stop = ["abc"]'),
    ("grpo.sampling.stop=[1]", "grpo.sampling.stop", "a list of text"),
    ("grpo.sampling.temperature=inf", "grpo.sampling.temperature", "a finite one"),
    ("grpo.sampling.temperature=-1", "grpo.sampling.temperature", "use 0 or more"),
    ("grpo.sampling.top_p=0", "grpo.sampling.top_p", "above 0 and 1 or less"),
    ("grpo.sampling.min_new_tokens=300", "grpo.sampling.min_new_tokens", "use 256 or less"),
    ('grpo.sampling.stop=["."," ",""]', "grpo.sampling.stop", "name the texts that end a completion"),
    ("grpo.clip.low=0.2", "grpo.clip.high", "add high"),
    ("grpo.clip=0.2", "grpo.clip", "grpo.clip.low, grpo.clip.high, grpo.clip.dual"),
    ("model=tiny", "model", "set one of its keys: model.source"),
    ("model.tiny.kv_heads=3", "model.tiny.kv_heads", "use a divisor of 4"),
    ("threads=0", "threads", "use 1 or more, or remove it"),
    ("seed=-1", "seed", "use 0 or more"),
    ("stages=[]", "stages", 'type = "grpo"'),
    ("stages=3", "stages", "[[stages]]"),
    ("rewards=answer", "rewards", "[[rewards]]"),
    ("grpo.task.digits=2", "grpo.task.type", 'add type = "arithmetic"'),
    ("grpo.type=a2c", "stages#2", "one of sft, grpo"),
    ("model.template_options=[1]", "model.template_options", "takes a table"),
]


@pytest.mark.parametrize(("change", "where", "words"), WRONG, ids=[case[0] for case in WRONG])
def test_a_wrong_key_or_value(change: str, where: str, words: str) -> None:
    error = refusal(change)
    assert error.where == where
    assert words in str(error)
    assert len(str(error).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("", "task", "add a line [task]"),
        ("[task]\ntype='a'", "stages", "add a line [[stages]]"),
        ("[task]\n[[stages]]\ntype='grpo'", "task.type", 'add type = "arithmetic"'),
        ("[task]\ntype='a'\n[stages]\ntype='grpo'", "stages", "with two brackets"),
        ("[[task]]\ntype='a'\n[[stages]]\ntype='grpo'", "task", "with one bracket"),
        ("[task]\ntype='a'\n[[stages]]\nsteps=3", "stages#1", 'write type = "grpo"'),
        ("[task]\ntype='a'\n[[stages]]\ntype='gpro'", "stages#1", 'write type = "grpo"'),
        ("[task]\ntype='a'\n[[stage]]\ntype='grpo'", "stage", "write stages"),
        ("[[rewards]]\nweight=1\n[task]\ntype='a'\n[[stages]]\ntype='grpo'", "rewards#1.type", 'add type = "answer"'),
        ("stages=[3]\n[task]\ntype='a'", "stages#1", "stages"),
    ],
)
def test_a_wrong_shape(text: str, where: str, words: str) -> None:
    error = refusal(data=tomllib.loads(text))
    assert error.where == where
    assert words in str(error)


def test_a_key_of_another_stage_is_taken_for_the_one_that_is_missing() -> None:
    data = base()
    data["stages"].append({"type": "dpo", "data": "pairs.jsonl"})
    assert refusal(data=data).fix == "write it as dpo.pairs, which is required and missing"
    data["stages"][-1]["pairs"] = "pairs.jsonl"
    assert refusal(data=data).fix == "write it as sft.data or reward_model.data"


def test_a_stage_is_called_by_its_name() -> None:
    data = base()
    data["stages"][1]["name"] = "second"
    assert refusal("second.kl.beta=-1", data=data).where == "second.kl.beta"
    assert refusal("second.learning_rate=1", data=data).fix.startswith("write it as second.optimiser.learning_rate")


def test_several_mistakes_give_one_error_that_names_them_all() -> None:
    error = refusal("seed=a", "model.dtype=3", "grpo.group_szie=16")
    assert error.where == "grpo.group_szie"
    assert error.fix.endswith("also wrong: seed, model.dtype")


def test_what_was_found_is_shown_as_toml_and_not_too_long() -> None:
    assert refusal("grpo.objective=gpro").what == '"gpro"'
    assert refusal("grpo.group_size=0").what == "0"
    assert len(str(refusal(f"grpo.objective={'x' * 500}").what)) == 80


class Options(Section):
    """Options of a made-up task."""

    digits: PositiveInt
    """How many digits."""
    levels: tuple[int, ...] = ()
    """Levels."""


def test_options_of_a_task_are_read_with_the_same_words() -> None:
    assert read_section(Options, {"digits": 2, "levels": [1, 2]}, "task") == Options(digits=2, levels=(1, 2))
    for options, where, words in [
        ({"digits": 0}, "task.digits", "use 1 or more"),
        ({"digist": 1}, "task.digist", "did you mean 'digits'"),
        ({}, "task.digits", "how many digits"),
        ({"digits": 1, "levels": 3}, "task.levels", "list of integer"),
    ]:
        with pytest.raises(RecipeError) as caught:
            read_section(Options, options, "task")
        assert caught.value.where == where
        assert words in str(caught.value)
