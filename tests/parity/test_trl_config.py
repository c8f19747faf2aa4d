"""A GRPOConfig of Python, written by TRL itself, becomes a recipe."""

from __future__ import annotations

from pathlib import Path

from trl import GRPOConfig

from oncurve.recipe.load import parse_recipe, parse_toml
from oncurve.recipe.schema.stages import Grpo
from oncurve.recipe.trl.convert import from_trl


def test_only_what_differs_from_the_defaults_is_noted(tmp_path: Path) -> None:
    config = GRPOConfig(
        output_dir="out", max_steps=10, num_generations=4, learning_rate=1e-5, beta=0.04, scale_rewards=False,
        lr_scheduler_type="cosine", repetition_penalty=1.1, shuffle_dataset=False, bf16=False, use_cpu=True,
    )  # fmt: skip
    path = tmp_path / "grpo.yaml"
    path.write_text(config.to_json_string())
    text, notes = from_trl(path)
    in_python = {"reward_funcs", "model_name_or_path", "dataset_name"}
    of_the_process = {
        "dataloader_pin_memory",
        "disable_tqdm",
    }  # they depend on the device and on the level of transformers' log
    assert {note.option for note in notes} - of_the_process == in_python | {
        "output_dir",
        "repetition_penalty",
        "shuffle_dataset",
    }
    recipe = parse_recipe(parse_toml(text, "converted.toml"))
    (stage,) = recipe.stages
    assert isinstance(stage, Grpo)
    assert (stage.steps, stage.group_size, stage.prompts_per_step, stage.minibatches) == (10, 4, 2, 1)
    assert (stage.kl.beta, stage.optimiser.learning_rate, stage.optimiser.schedule) == (0.04, 1e-5, "cosine")
    assert (stage.advantage.scale, recipe.model.dtype, recipe.model.device) == ("none", "float32", "cpu")
