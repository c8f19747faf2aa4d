from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from oncurve.errors import DataError
from oncurve.recipe.defaults import advantage_settings
from oncurve.recipe.keys import recipe_keys
from oncurve.recipe.load import parse_recipe, parse_toml
from oncurve.recipe.schema.model import Lora
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import Grpo
from oncurve.recipe.trl.config import TRL_DEFAULTS, TRL_TABLE
from oncurve.recipe.trl.convert import ConversionNote, from_trl
from oncurve.recipe.trl.options import CONVERSIONS, TRL_OPTIONS


def translate(tmp_path: Path, yaml: str, processes: int = 1) -> tuple[Recipe, Grpo, list[ConversionNote]]:
    path = tmp_path / "config.yaml"
    path.write_text(yaml)
    text, notes = from_trl(path, processes)
    recipe = parse_recipe(parse_toml(text, "converted.toml"))
    stage = recipe.stages[0]
    assert isinstance(stage, Grpo)
    return recipe, stage, notes


def test_a_complete_config(tmp_path: Path) -> None:
    yaml = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: data.jsonl
learning_rate: 2e-6
loss_type: grpo
num_generations: 4
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
steps_per_generation: 8
num_iterations: 2
max_steps: 1000
warmup_ratio: 0.1
save_steps: 100
eval_strategy: steps
eval_steps: 0.05
beta: 0.04
epsilon_high: 0.28
delta: 3
sync_ref_model: true
ref_model_sync_steps: 64
top_entropy_quantile: 0.2
use_adaptive_entropy: true
entropy_coef_delta: 0.01
temperature: 0.9
top_k: -1
max_completion_length: 300
mask_truncated_completions: true
adam_beta2: 0.95
reward_funcs: [my.lib.short]
reward_weights: [0.2]
bf16: false
"""
    recipe, stage, notes = translate(tmp_path, yaml)
    assert "ref_model_mixup_alpha" not in {note.option for note in notes}
    assert (recipe.model.source, recipe.model.dtype, recipe.seed) == ("Qwen/Qwen3-0.6B", "float32", 42)
    assert recipe.task.options["path"] == "data.jsonl"
    assert (recipe.rewards[0].label, recipe.rewards[0].weight) == ("short", 0.2)
    assert recipe.rewards[0].options == {"function": "my.lib:short"}
    # 8 × 8 = 64 completions are sampled at once: 16 groups of 4; an update takes 8 × 4 = 32 of them, and each is used twice.
    assert (stage.prompts_per_step, stage.group_size, stage.minibatches, stage.updates_per_step) == (16, 4, 2, 2)
    # 4 updates per step: 1000 updates are 250 steps, 100 are 25, 0.05 × 1000 are 13 (rounded up), 64 are 16.
    assert (stage.steps, stage.save_every, stage.eval_every, stage.kl.refresh_every) == (250, 25, 13, 16)
    assert stage.optimiser.warmup_steps == 100
    assert (stage.optimiser.learning_rate, stage.optimiser.schedule, stage.optimiser.betas) == (2e-6, "linear", (0.9, 0.95))
    assert stage.clip is not None
    assert (stage.clip.low, stage.clip.high, stage.clip.dual) == (0.2, 0.28, 3.0)
    assert (stage.kl.beta, stage.kl.ratio_weighted, stage.kl.refresh_mix) == (0.04, True, 0.6)
    assert (stage.entropy.top_share, stage.entropy.target, stage.entropy.bonus_step) == (0.2, 0.2, 0.01)
    assert (stage.sampling.temperature, stage.sampling.top_k, stage.sampling.max_new_tokens) == (0.9, 0, 300)
    assert stage.mask_cut


def test_a_data_set_of_the_hub_becomes_a_file_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe reads files: the note says that one has to be named."""
    recipe, _, notes = translate(tmp_path, "dataset_name: trl-lib/DeepMath-103K\ndataset_train_split: train")
    assert recipe.task.options["path"] == "hf://datasets/trl-lib/DeepMath-103K/FILE"
    (note,) = (note for note in notes if note.option == "dataset_name")
    assert "write its path in the data set instead of FILE in task.path, of split train" in str(note)
    for path in ("data/train.jsonl", "data/train.jsonl.gz", "/data/train.parquet", "./data/train", "train.csv"):
        recipe, _, notes = translate(tmp_path, f"dataset_name: {path}")
        assert recipe.task.options["path"] == path
        assert not [note for note in notes if note.option == "dataset_name"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "v1").mkdir(parents=True)
    assert translate(tmp_path, "dataset_name: data/v1")[0].task.options["path"] == "data/v1"


def test_what_the_file_leaves_unsaid_is_trls_default(tmp_path: Path) -> None:
    recipe, stage, notes = translate(tmp_path, "output_dir: out")
    assert (stage.objective, stage.group_size, stage.prompts_per_step, stage.minibatches) == ("dapo", 8, 1, 1)
    assert stage.clip is not None
    assert (stage.clip.low, stage.clip.high) == (0.2, 0.2)
    assert (recipe.seed, recipe.model.dtype, stage.sampling.max_new_tokens) == (42, "bfloat16", 512)
    assert (stage.optimiser.schedule, stage.optimiser.learning_rate, stage.save_every) == ("linear", 1e-6, 500)
    assert {note.option for note in notes} == {"max_steps", "reward_funcs", "dataset_name", "model_name_or_path", "output_dir"}


def test_a_data_set_of_the_hub_is_noted(tmp_path: Path) -> None:
    for name, expected in (("trl-lib/DeepMath-103K", 1), ("data.jsonl", 0), ("hf://datasets/me/sums/train.parquet", 0)):
        _, _, notes = translate(tmp_path, f"dataset_name: {name}")
        assert sum(note.option == "dataset_name" for note in notes) == expected


def test_batch_sizes_are_per_device(tmp_path: Path) -> None:
    _, stage, _ = translate(tmp_path, "per_device_train_batch_size: 16\nnum_generations: 8", processes=4)
    assert stage.prompts_per_step == 8
    _, stage, _ = translate(tmp_path, "generation_batch_size: 64\nper_device_train_batch_size: 16\nnum_generations: 8")
    assert (stage.prompts_per_step, stage.minibatches) == (8, 4)


@pytest.mark.parametrize(
    ("yaml", "objective", "note"),
    [
        ("loss_type: grpo", "grpo", None),
        ("loss_type: dr_grpo", "dr_grpo", None),
        ("loss_type: bnpo", "bnpo", "micro-batch"),
        ("loss_type: sapo", "sapo", None),
        ("loss_type: cispo\nepsilon_high: 5.0", "cispo", None),
        ("loss_type: grpo\nimportance_sampling_level: sequence", "gspo", None),
        ("loss_type: dapo\nimportance_sampling_level: sequence", "gspo", "no counterpart"),
        ("loss_type: luspo\nimportance_sampling_level: sequence", "luspo", None),
        ("loss_type: vespo", "vespo", None),
    ],
)
def test_loss_types(tmp_path: Path, yaml: str, objective: str, note: str | None) -> None:
    _, stage, notes = translate(tmp_path, yaml)
    assert stage.objective == objective
    texts = [n.text for n in notes if n.option == "loss_type"]
    assert (note is None and not texts) or (note is not None and note in texts[0])


@pytest.mark.parametrize(
    ("loss", "is_noted"), [("grpo", True), ("dr_grpo", True), ("sapo", True), ("dapo", False), ("bnpo", False)]
)
def test_masked_completions_leave_another_denominator(tmp_path: Path, loss: str, is_noted: bool) -> None:
    """Of losses that divide by the number of completions; a mean over tokens is the same in both."""
    _, stage, notes = translate(tmp_path, f"loss_type: {loss}\nmask_truncated_completions: true")
    assert stage.mask_cut
    texts = [n.text for n in notes if n.option == "mask_truncated_completions"]
    assert len(texts) == is_noted
    assert all("B / (B − t) times TRL's" in text for text in texts)
    _, _, notes = translate(tmp_path, f"loss_type: {loss}")
    assert "mask_truncated_completions" not in {n.option for n in notes}


def test_the_clip_of_cispo_and_sapo(tmp_path: Path) -> None:
    _, stage, _ = translate(tmp_path, "loss_type: cispo\nepsilon_high: 5.0")
    assert stage.clip is not None
    assert (stage.clip.low, stage.clip.high) == (1.0, 4.0)
    _, stage, notes = translate(tmp_path, "loss_type: cispo")
    assert stage.clip is None
    assert "epsilon_high" in {note.option for note in notes}
    _, stage, notes = translate(tmp_path, "loss_type: sapo\nepsilon: 0.1\ndelta: 2")
    assert stage.clip is None
    assert {"epsilon", "delta"} <= {note.option for note in notes}


@pytest.mark.parametrize(
    ("yaml", "scale"),
    [
        ("loss_type: dr_grpo", "group"),
        ("loss_type: dr_grpo\nscale_rewards: false", "none"),
        ("scale_rewards: true", "group"),
        ("scale_rewards: batch", "batch"),
        ("{}", "group"),
    ],
)
def test_rewards_are_scaled_as_in_trl(tmp_path: Path, yaml: str, scale: str) -> None:
    assert advantage_settings(translate(tmp_path, yaml)[1])[1] == scale


def test_schedules(tmp_path: Path) -> None:
    optimiser = translate(tmp_path, "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}")[
        1
    ].optimiser
    assert (optimiser.schedule, optimiser.final_share) == ("cosine", 0.1)
    optimiser = translate(tmp_path, "lr_scheduler_type: constant\nwarmup_steps: 10")[1].optimiser
    assert (optimiser.schedule, optimiser.warmup_steps) == ("constant", 0)
    optimiser = translate(tmp_path, "lr_scheduler_type: constant_with_warmup\nwarmup_steps: 10")[1].optimiser
    assert (optimiser.schedule, optimiser.warmup_steps) == ("constant", 10)
    for yaml, steps in (
        ("warmup_ratio: 0.1\nwarmup_steps: 0", 11),
        ("warmup_ratio: 0.1\nwarmup_steps: 5", 5),
        ("warmup_steps: 0.1", 11),
    ):
        assert translate(tmp_path, f"max_steps: 105\n{yaml}")[1].optimiser.warmup_steps == steps  # a fraction is rounded up
    _, _, notes = translate(tmp_path, "lr_scheduler_type: polynomial\nwarmup_steps: 0.1")
    assert {"lr_scheduler_type", "warmup_steps"} <= {note.option for note in notes}


def test_importance_sampling_is_converted_only_if_it_means_the_same(tmp_path: Path) -> None:
    same = "use_vllm: true\nvllm_importance_sampling_mode: token_truncate\n"
    assert translate(tmp_path, same + "vllm_importance_sampling_cap: 2.0")[1].importance_cap == 2.0
    assert translate(tmp_path, same + "vllm_importance_sampling_clip_max: 4.0")[1].importance_cap == 4.0
    for mode, name in (("token_mask", "mis"), ("sequence_truncate", "seq_tis"), ("sequence_mask", "seq_mis")):
        yaml = f"use_vllm: true\nvllm_importance_sampling_mode: {mode}\nvllm_importance_sampling_cap: 2.0"
        _, stage, notes = translate(tmp_path, yaml)
        assert (stage.importance_cap, stage.correction) == (None, None)
        assert any(f'{mode} corresponds to grpo.correction = "{name}"' in note.text for note in notes)


def test_rewards_and_their_weights(tmp_path: Path) -> None:
    yaml = "reward_model_name_or_path: rm\nreward_funcs: [get_soft_overlong_punishment, think_format_reward, a.b]\n"
    recipe, _, notes = translate(tmp_path, yaml + "reward_weights: [9, 0.1, 0.2, 0.3]")
    weights = [(reward.label, reward.weight) for reward in recipe.rewards]
    assert weights == [("model", 9.0), ("overlong", 0.1), ("format", 0.2), ("b", 0.3)]
    assert recipe.rewards[0].options == {"model": "rm"}
    notes_by_option = {note.option: note.text for note in notes}
    assert {"get_soft_overlong_punishment", "think_format_reward"} <= notes_by_option.keys()
    assert "chat template" in notes_by_option["reward_model_name_or_path"]
    recipe, _, _ = translate(tmp_path, "reward_funcs: a.b\nreward_weights: 0.5")
    assert [(reward.label, reward.weight) for reward in recipe.rewards] == [("b", 0.5)]


def test_the_rewards_of_trl_become_those_that_say_the_same(tmp_path: Path) -> None:
    """What they are compared with is in `tests/parity/test_trl_rewards.py`, by the same options."""
    recipe, _, _ = translate(tmp_path, "reward_funcs: [accuracy_reward, think_format_reward, get_soft_overlong_punishment]")
    boxed, think, overlong = recipe.rewards
    assert (overlong.type, overlong.options) == ("overlong", {"limit": 1280, "buffer": 256})
    assert (boxed.type, boxed.options) == ("math", {"take": "boxed", "column": "solution"})
    assert (think.type, think.options) == ("format", {"pattern": "<think>(?!.*<think>).*?</think>.*"})


def test_an_adapter(tmp_path: Path) -> None:
    yaml = "use_peft: true\nlora_alpha: 64\nlora_target_modules: [q_proj, v_proj]\nuse_rslora: true\nload_in_4bit: true"
    model = translate(tmp_path, yaml)[0].model
    assert model.lora == Lora(rank=16, alpha=64.0, targets=("q_proj", "v_proj"), rslora=True)
    assert model.quantise == "nf4"
    recipe, _, notes = translate(tmp_path, "use_peft: true\nlora_r: 8\nload_in_8bit: true")
    assert (recipe.model.lora, recipe.model.quantise) == (Lora(rank=8), "int8")
    assert "lora_target_modules" in {note.option for note in notes}
    recipe, _, notes = translate(tmp_path, "lora_r: 8\nload_in_8bit: true")
    assert (recipe.model.lora, recipe.model.quantise) == (None, None)
    assert {"lora_r", "load_in_4bit"} <= {note.option for note in notes}


@pytest.mark.parametrize(
    ("yaml", "moments", "has_note"),
    [("adamw_torch_fused", "float32", False), ("paged_adamw_8bit", "int8", False), ("adafactor", "float32", True)],
)
def test_optimisers(tmp_path: Path, yaml: str, moments: str, has_note: bool) -> None:
    _, stage, notes = translate(tmp_path, f"optim: {yaml}")
    assert stage.optimiser.moments == moments
    assert ("optim" in {note.option for note in notes}) is has_note


def test_checkpointing_determinism_and_places_for_curves(tmp_path: Path) -> None:
    yaml = "gradient_checkpointing: true\nfull_determinism: true\nreport_to: [wandb, trackio, mlflow]\nproject: p"
    recipe, stage, notes = translate(tmp_path, yaml)
    assert (stage.checkpointing, recipe.deterministic) == ("on", True)
    assert [(sink.type, sink.project) for sink in recipe.sinks] == [("wandb", "oncurve"), ("trackio", "p")]
    assert [note.value for note in notes if note.option == "report_to"] == ["mlflow"]
    assert translate(tmp_path, "{}")[1].checkpointing == "auto"


def test_vllm_is_left_to_its_user(tmp_path: Path) -> None:
    recipe, _, notes = translate(tmp_path, "use_vllm: true\nvllm_tensor_parallel_size: 4")
    notes_by_option = {note.option: note.text for note in notes}
    assert recipe.scale.engine == "native"
    assert 'scale.engine = "vllm"' in notes_by_option["use_vllm"]
    assert "scale.vllm_tensor" in notes_by_option["vllm_tensor_parallel_size"]


def test_epochs_are_not_steps(tmp_path: Path) -> None:
    """TRL can save and evaluate once per epoch, or save the best; a recipe counts steps."""
    _, stage, notes = translate(tmp_path, "max_steps: 10\nsave_strategy: epoch\neval_strategy: epoch")
    assert (stage.save_every, stage.eval_every) == (0, 0)
    notes_by_option = {note.option: note.text for note in notes}
    assert "save_strategy is epoch" in notes_by_option["save_steps"]
    assert "eval_strategy is epoch" in notes_by_option["eval_steps"]
    _, _, notes = translate(tmp_path, "max_steps: 10\nsave_strategy: best")
    assert "grpo.keep_best" in {note.option: note.text for note in notes}["save_steps"]
    _, stage, notes = translate(tmp_path, "max_steps: 10\nsave_strategy: no\neval_strategy: no")  # YAML reads `no` as false
    assert (stage.save_every, stage.eval_every) == (0, 0)
    assert not {"save_steps", "eval_steps"} & {note.option for note in notes}


def test_rows_are_held_out_only_if_trl_evaluates(tmp_path: Path) -> None:
    recipe, _, notes = translate(tmp_path, "dataset_name: data.jsonl")
    assert recipe.task.options == {"path": "data.jsonl", "heldout_share": 0.0}
    assert "eval_strategy" not in {note.option for note in notes}
    recipe, _, notes = translate(tmp_path, "dataset_name: data.jsonl\neval_strategy: steps\neval_steps: 5")
    assert recipe.task.options == {"path": "data.jsonl"}
    assert "task.heldout_path" in {note.option: note.text for note in notes}["eval_strategy"]
    assert translate(tmp_path, "beta: 0")[0].task.options == {"path": "train.jsonl", "heldout_share": 0.0}


def test_accumulation_makes_a_step_larger(tmp_path: Path) -> None:
    _, stage, _ = translate(tmp_path, "gradient_accumulation_steps: 4")
    assert (stage.prompts_per_step, stage.minibatches) == (4, 1)
    assert TRL_OPTIONS["gradient_accumulation_steps"].key == "grpo.prompts_per_step"


def test_nothing_is_dropped_in_silence(tmp_path: Path) -> None:
    _, _, notes = translate(tmp_path, "lora_dropout: 0.1\nlog_level: info\nbogus: 1\nnum_genrations: 4")
    notes_by_option = {note.option: note.text for note in notes}
    assert "always off" in notes_by_option["lora_dropout"]
    assert "database" in notes_by_option["log_level"]
    assert "no such option" in notes_by_option["bogus"]
    assert "did you mean 'num_generations'" in notes_by_option["num_genrations"]


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("- a", "a mapping of options"),
        ("a: [", "not YAML"),
        ("num_generations: 3", "not a multiple of the group size"),
        ("learning_rate: fast", "takes a number"),
        ("num_generations: 2.5", "takes an integer"),
        ("reward_funcs: [a.b]\nreward_weights: [1, 2]", "one weight per reward"),
    ],
)
def test_configs_that_trl_would_not_take(tmp_path: Path, yaml: str, words: str) -> None:
    with pytest.raises(DataError) as caught:
        translate(tmp_path, yaml)
    assert words in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        from_trl(tmp_path / "none.yaml")


def declared(package: str, path: str, owner: str) -> dict[str, Any]:
    """The fields of a dataclass with their literal defaults, read from its source: importing it would take seconds."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    source = ast.parse((Path(spec.origin).parent / path).read_text())
    body = next(node for node in source.body if isinstance(node, ast.ClassDef) and node.name == owner).body
    return {
        item.target.id: default_of(item)
        for item in body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def default_of(item: ast.AnnAssign) -> Any:
    arguments = (
        {word.arg: word.value for word in item.value.keywords} if isinstance(item.value, ast.Call) else {"default": item.value}
    )
    value = arguments.get("default")
    return value.value if isinstance(value, ast.Constant) else None


def trl_fields() -> dict[str, Any]:
    return (
        declared("transformers", "training_args.py", "TrainingArguments")
        | declared("trl", "trainer/base_config.py", "_BaseConfig")
        | declared("trl", "trainer/grpo_config.py", "GRPOConfig")
        | declared("trl", "trainer/model_config.py", "ModelConfig")
    )


def test_every_option_of_trl_is_in_the_table() -> None:
    known = (
        trl_fields()
        | declared("trl", "scripts/grpo.py", "GRPOScriptArguments")
        | declared("trl", "scripts/utils.py", "ScriptArguments")
    )
    assert set(known) - set(TRL_OPTIONS) == set()
    assert all(option.key or option.remark for option in TRL_OPTIONS.values())


def test_trls_defaults_are_as_installed() -> None:
    fields = trl_fields()
    assert {name: fields[name] for name in TRL_DEFAULTS if fields[name] is not None} == {
        name: value for name, value in TRL_DEFAULTS.items() if fields[name] is not None
    }


def test_every_kind_of_the_table_is_a_conversion() -> None:
    assert {row["kind"] for row in TRL_TABLE["options"].values() if "kind" in row} == set(CONVERSIONS)


def test_every_recipe_key_of_the_table_exists() -> None:
    known = {entry.key for entry in recipe_keys()} | {"task.path", "task.heldout_share"}
    assert {option.key.replace("NAME.", "") for option in TRL_OPTIONS.values() if option.key} - known == set()
