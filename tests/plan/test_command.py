"""The command `oncurve plan`, and the line that `oncurve train` prints before a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from oncurve.cli import plan as plan_command
from oncurve.cli.app import main
from oncurve.errors import ModelError, RunError
from oncurve.plan.hardware import GIB, GPUS, Gpu, find_gpu
from oncurve.recipe.load import load_recipe

Plan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    def run(*arguments: object, columns: int = 80) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        capsys.readouterr()
        code = main(["plan", *map(str, arguments)])
        return (code, *capsys.readouterr())

    return run


@pytest.mark.parametrize("columns", [80, 120])
def test_bars_verdict_and_tables_fit_the_terminal(plan: Plan, columns: int) -> None:
    code, out, _ = plan("--model", "Qwen/Qwen3-8B", "--gpu", "H100-80GB", columns=columns)
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns
    for word in (
        "does not fit an H100-80GB",
        "cheapest change: ",
        "ppo, full",
        "grpo, LoRA",
        "master weights",
        "samples per day",
    ):
        assert word in " ".join(out.split())
    bars = [line for line in out.splitlines() if line.startswith(("grpo, ", "ppo, ")) and "GiB" in line and "│" in line]
    assert len(bars) == 4
    assert len({line.index("│") for line in bars}) == 1  # one scale
    models = next(line for line in out.splitlines() if line.startswith("model"))
    assert models.split() == ["model", "0.6B", "1.7B", "4B", "8B", "14B", "32B"]  # none truncated


def test_what_does_not_fit_has_no_step_time(plan: Plan) -> None:
    """The times of a model that is too large would be lower than those of a smaller one that fits."""
    _, out, _ = plan("--model", "Qwen/Qwen3-4B", "--gpu", "H200", "--new-tokens", 4096)
    lines = out.splitlines()
    models = next(i for i, line in enumerate(lines) if line.startswith("model"))
    assert lines[models + 2].split()[-3:] == ["✗", "✗", "✗"]  # 8B, 14B, 32B
    full, ppo, lora, ppo_lora = next(line for line in lines if line.startswith("step")).split()[1:]
    assert ppo == "✗"
    assert 0 < float(full) < 600
    assert float(lora) < float(ppo_lora)
    assert "✗ does not fit" in lines
    data = json.loads(plan("--model", "Qwen/Qwen3-4B", "--gpu", "H200", "--new-tokens", 4096, "--json")[1])
    rows = [row for row in data["growth"] if row["what"] == "model"]
    assert [row["fits"] for row in rows] == [True, True, True, False, False, False]


def test_larger_parts_have_longer_bars(plan: Plan) -> None:
    _, out, _ = plan("--model", "7B", "--gpu", "H200")
    grpo, ppo = (next(x for x in out.splitlines() if x.startswith(name)) for name in ("grpo, full", "ppo, full"))
    assert ppo.count("c") > grpo.count("c")


def test_json_and_nothing_else(plan: Plan) -> None:
    code, out, err = plan("--model", "Qwen/Qwen3-0.6B", "--gpu", "H200", "--algorithm", "ppo", "--lora", "--json")
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert data["plan"]["title"] == "ppo, LoRA"
    assert data["asked"]["lora_rank"] == 16
    assert data["plan"]["memory"]["fits"] is True


def test_a_recipe_on_this_machine(plan: Plan) -> None:
    code, out, _ = plan("arithmetic", "--json")
    request = json.loads(out)["asked"]
    assert code == 0
    assert request["gpu"]["name"] == "cpu"
    assert (request["prompts"], request["group_size"], request["new_tokens"]) == (32, 8, 40)
    assert request["prompt_tokens"] == len("999+999=")


def test_a_recipe_with_set_and_flags(plan: Plan) -> None:
    _, out, _ = plan(
        "arithmetic", "--gpu", "T4", "--set", "grpo.group_size=16", "--new-tokens", 100, "--stage", "grpo", "--json"
    )
    request = json.loads(out)["asked"]
    assert (request["group_size"], request["new_tokens"], request["gpu"]["name"]) == (16, 100, "T4")


def test_a_reward_model_that_the_recipe_trains_has_the_policys_size(plan: Plan) -> None:
    changes = ["--set", "model.source=HuggingFaceTB/SmolLM2-135M", "--set", "task.path=recipes/backwards.jsonl"]
    code, out, err = plan("rlhf", "--gpu", "H200", *changes, "--set", "task.type=file", "--prompt-tokens", 200, "--json")
    assert (code, err) == (0, "")
    request = json.loads(out)["asked"]
    assert request["reward_model"] == request["model"]["name"] == "HuggingFaceTB/SmolLM2-135M"


def test_demonstrations_have_their_own_length(plan: Plan) -> None:
    _, out, _ = plan("arithmetic", "--stage", "sft", "--json")
    request = json.loads(out)["asked"]
    assert request["algorithm"] == "sft"
    assert 20 < request["new_tokens"] < 120


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "Qwen/Qwen9-8B", "--gpu", "H200"], "Qwen/Qwen3-8B"),
        (["--model", "7B", "--gpu", "H20O"], "H200"),
        (["--model", "7B", "--algorithm", "gppo"], "did you mean"),
        ([], "--model"),
        (["arithmetic", "--model", "7B"], "both"),
        (["arithmetic", "--stage", "gpro"], "sft"),
        (["--model", "7B", "--new-tokens", "9000"], "4096 positions"),
        (["--model", "7B", "--sharding", "full"], "--gpus 2"),
    ],
)
def test_user_errors_print_one_message(plan: Plan, arguments: list[str], words: str) -> None:
    code, out, err = plan(*arguments)
    assert code == 2
    assert out == ""
    assert words in " ".join(err.split())
    assert "Traceback" not in err


def test_a_config_without_its_fields(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    code, _, err = plan("--model", tmp_path / "config.json")
    assert code == 2
    assert "num_hidden_layers" in err


def test_many_gpus_are_simulated_both_ways(plan: Plan) -> None:
    arguments = ("--model", "Qwen/Qwen3-0.6B", "--gpu", "H200", "--gpus", 4, "--prompts", 8, "--new-tokens", 512)
    code, out, _ = plan(*arguments)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "GPUs, simulated" in out
    data = json.loads(plan(*arguments, "--staleness", 2, "--json")[1])["cluster"]
    assert [row["gpus"] for row in data["sizes"]] == [1, 4, 8, 64, 512]
    assert data["sizes"][0]["apart"] is None
    assert all(row["apart"]["staleness_max"] <= 2 for row in data["sizes"][1:])


def test_one_gpu_and_what_does_not_sample_need_no_simulation(plan: Plan) -> None:
    assert "cluster" not in json.loads(plan("--model", "7B", "--gpu", "H200", "--json")[1])
    assert "cluster" not in json.loads(plan("--model", "7B", "--gpu", "H200", "--gpus", 8, "--algorithm", "sft", "--json")[1])


SMALL_RECIPE = """
name = "small"
threads = 1
model = { tiny = { layers = 1, width = 32, heads = 2, kv_heads = 1, head_size = 16, mlp_width = 64, context = 128 } }
task = { type = "arithmetic", digits = 1, heldout = 2 }
rewards = [{ type = "format" }]
stages = [{ type = "grpo", steps = 2, prompts_per_step = 2, group_size = 2, sampling = { max_new_tokens = 12 } }]
"""


def test_lengths_and_times_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL_RECIPE)
    assert main(["train", str(tmp_path / "small.toml"), "--runs", str(tmp_path)]) == 0
    measured = plan_command.measured_run("small-1", tmp_path, find_gpu("cpu"))
    assert len(measured.lengths) == 2 * 2 * 2
    assert all(1 <= length <= 12 for length in measured.lengths)
    assert measured.sample_ratio > 0
    assert measured.update_ratio > 0
    with pytest.raises(RunError, match="nobody"):
        plan_command.measured_run("nobody", tmp_path, find_gpu("cpu"))


def use_gpu(monkeypatch: pytest.MonkeyPatch, gpu: Gpu | None) -> None:
    monkeypatch.setattr(plan_command, "gpu_here", lambda recipe: gpu)


def test_the_plan_of_a_run_on_a_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use_gpu(monkeypatch, GPUS["H200"])
    monkeypatch.setenv("COLUMNS", "200")
    plan_command.print_plan(load_recipe("arithmetic"))
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("plan: grpo fits an H200: ")
    assert printed.err.count("\n") == 1


def test_on_a_cpu_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    plan_command.print_plan(load_recipe("arithmetic", ["model.device=cpu"]))
    assert capsys.readouterr() == ("", "")


def test_a_run_that_cannot_fit_is_refused_with_a_fix_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu(monkeypatch, GPUS["A100-80GB"])
    recipe = load_recipe("arithmetic", ["model.source=Qwen/Qwen3-8B", "model.dtype=bfloat16"])
    with pytest.raises(ModelError) as error:
        plan_command.print_plan(recipe)
    assert "does not fit an A100-80GB" in str(error.value.what)
    assert "moments 61.0" in error.value.because
    sets = [word for word in error.value.fix.split() if "=" in word]
    fixed = load_recipe("arithmetic", ["model.source=Qwen/Qwen3-8B", "model.dtype=bfloat16", *sets])
    plan_command.print_plan(fixed)


def test_an_unknown_gpu_has_a_plan_of_memory_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = replace(GPUS["T4"], name="Voodoo", memory=8 * GIB, flops=float("inf"), bandwidth=float("inf"), link=float("inf"))
    use_gpu(monkeypatch, unknown)
    monkeypatch.setenv("COLUMNS", "200")
    plan_command.print_plan(load_recipe("arithmetic"))
    assert "per step" not in capsys.readouterr().err


def test_an_unknown_model_does_not_stop_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    use_gpu(monkeypatch, GPUS["H200"])
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    plan_command.print_plan(load_recipe("arithmetic", ["model.source=nobody/knows"]))
    assert "no plan: nobody/knows" in capsys.readouterr().err
