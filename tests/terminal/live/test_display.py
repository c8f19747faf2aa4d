from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from oncurve.recipe.load import load_recipe
from oncurve.records import EvalReport, StepReport
from oncurve.terminal.live.display import LiveDisplay, Panel, kl_figure, step_line
from oncurve.terminal.live.progress import RunProgress, StageProgress

RECIPE = load_recipe("arithmetic", ["sft.steps=300", "grpo.steps=200"])
METRICS = {
    "reward": 0.8,
    "entropy": 0.9,  # over the tokens that the update forwards
    "sampled_entropy": 0.212,
    "tokens_per_s": 4210.0,
    "length_mean": 23.44,
    "no_signal_share": 0.31,
    "cut_share": 0.02,
}


def middle_of_a_run(display: LiveDisplay) -> RunProgress:
    """A run at grpo step 84: sft took 41 s, grpo has taken 62 s."""
    display.on_run_start(RECIPE, Path("runs/arithmetic-1"), 842_112, None)
    display.on_stage_start("sft", "sft", 0, 300, 0)
    for n in range(1, 301):
        display.on_step(StepReport("sft", n, {"loss": 3 - n / 100, "entropy": 1.2, "tokens_per_s": 9000.0}, {"update": 0.1}))
    display.on_eval(EvalReport("sft", 300, 0.42, 200, {}))
    display.on_stage_end("sft")
    display.on_stage_start("grpo", "grpo", 1, 200, 0)
    for n in range(1, 85):
        display.on_step(StepReport("grpo", n, METRICS | {"reward": n / 100}, {"sample": 0.6, "score": 0.001, "update": 0.399}))
    display.on_eval(EvalReport("grpo", 84, 0.615, 200, {}))
    assert display.progress is not None
    sft, grpo = display.progress.stages
    sft.began, sft.ended, grpo.began = 1000.0, 1041.0, 1041.0
    return display.progress


def picture(progress: RunProgress, width: int) -> list[str]:
    console = Console(width=width, record=True, force_terminal=True, color_system=None, file=io.StringIO())
    console.print(Panel(progress, clock=lambda: 1103.0))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_picture_is_eight_lines_at_any_width(width: int) -> None:
    lines = picture(middle_of_a_run(LiveDisplay(Console(file=io.StringIO()))), width)
    assert len(lines) == 8
    assert max(map(len, lines)) <= width


def test_the_picture_says_all_that_matters_at_80() -> None:
    lines = [" ".join(line.split()) for line in picture(middle_of_a_run(LiveDisplay(Console(file=io.StringIO()))), 80)]
    assert lines[0] == "arithmetic-1 842k parameters · arithmetic · runs/arithmetic-1"
    assert lines[1].endswith("300/300 0:41 done")
    assert lines[2].endswith("84/200 1:02 1:26 left")  # 62 s for 84 steps, 116 to go
    assert lines[4] == "reward 0.840 ▁▁▂▂▃▃▄▄▅▅▆▆▇▇██ entropy 0.212 nats"
    assert lines[5] == "held-out 61.5 % ▄▅ +19.5 length 23.4 tokens, 2 % truncated"
    assert lines[6] == "KL – no signal 31 % of groups"
    assert lines[7] == "speed 4,210 tokens/s time sample 60 % · update 40 %"


def test_in_a_narrow_picture_no_phase_is_shown_in_part() -> None:
    progress = middle_of_a_run(LiveDisplay(Console(file=io.StringIO())))
    progress.current_stage.seconds.clear()
    progress.current_stage.seconds.update({"update": 0.6, "sample": 0.25, "score": 0.1, "grade": 0.05})
    assert picture(progress, 80)[7].rstrip().endswith("time       update 60 % · sample 25 %")
    assert "score 10 % · grade 5 %" in picture(progress, 120)[7]


def test_a_log_gets_lines_and_no_control_codes() -> None:
    out = io.StringIO()
    display = LiveDisplay(Console(file=out, highlight=False), line_every_s=1e9)
    middle_of_a_run(display)
    display.on_event("damaged", "grpo-000080 is damaged")
    display.on_run_end("finished")
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert lines[0] == "arithmetic-1: 842k parameters, task arithmetic, in runs/arithmetic-1"
    assert lines[1].startswith("sft 1/300  loss 2.99  entropy 1.20  9,000 tokens/s")
    assert lines[2].startswith("sft 300/300")
    assert lines[3] == "sft 300: held-out accuracy 42.0 % of 200 prompts"
    assert lines[4].startswith("grpo 1/200  reward 0.0100  KL –  entropy 0.212  length 23.4  no signal 31 %  4,210 tokens/s")
    assert lines[-1] == "grpo-000080 is damaged"
    assert len(lines) == 7


def test_failed_rewards_are_shown_if_there_are_any() -> None:
    display = LiveDisplay(Console(file=io.StringIO()))
    progress = middle_of_a_run(display)
    assert "failed" not in step_line(progress.current_stage, now=1103.0)
    progress.current_stage.add_step(StepReport("grpo", 85, METRICS | {"no_signal_share": 1.0, "failure_share": 0.875}, {}))
    assert "no signal 100 %  failed 88 %  4,210 tokens/s" in step_line(progress.current_stage, now=1103.0)
    for width in (60, 80):
        assert "no signal 100 %, failed 88 %" in " ".join(picture(progress, width)[6].split())


def test_a_line_says_only_what_its_stage_measures() -> None:
    stage = StageProgress("reward_model", "reward_model", 2)
    stage.add_step(StepReport("reward_model", 1, {"loss": 0.7, "pair_accuracy": 0.5, "tokens_per_s": 120.0}, {"update": 0.1}))
    assert step_line(stage, now=0.0) == "reward_model 1/2  loss 0.700  pair accuracy 50 %  120 tokens/s"
    stage = StageProgress("rejection_sample", "rejection_sample", 2, updates_policy=False)
    stage.add_step(StepReport("rejection_sample", 1, {"reward": 0.25, "samples_kept": 3.0, "tokens_per_s": 120.0}, {}))
    assert step_line(stage, now=0.0) == "rejection_sample 1/2  reward 0.250  kept 3  120 tokens/s"
    assert "KL" not in (line := alone(stage))
    assert "kept 3 in the last step" in " ".join(line.split())


def alone(stage: StageProgress) -> str:
    """The panel of a run with one stage."""
    return "\n".join(picture(RunProgress("run", Path("runs/run"), 1, "hh", [stage]), 80))


def test_an_evaluation_without_a_verifiable_reward_shows_its_reward() -> None:
    out = io.StringIO()
    display = LiveDisplay(Console(file=out, highlight=False), line_every_s=1e9)
    display.on_run_start(RECIPE, Path("runs/x"), 1, None)
    for step, reward in ((0, -1.25), (20, 0.4)):
        display.on_eval(EvalReport("grpo", step, None, 128, {}, {"reward": reward}))
    assert out.getvalue().splitlines()[1:] == [
        "grpo 0: held-out reward −1.25, mean of 128 prompts",
        "grpo 20: held-out reward 0.40, mean of 128 prompts",
    ]
    assert display.progress is not None
    lines = [" ".join(line.split()) for line in picture(display.progress, 80)]
    assert lines[5] == "held-out 0.40 ▁█ +1.65 length –"


def test_a_measurement_shows_how_far_it_is_until_it_is_done() -> None:
    """In the panel instead of the last result; in a log as a line per interval."""
    out = io.StringIO()
    display = LiveDisplay(Console(file=out, highlight=False), line_every_s=0.0)
    display.on_run_start(RECIPE, Path("runs/x"), 1, None)
    display.on_measuring("sft", 300, 0.25)
    assert out.getvalue().splitlines()[-1] == "sft 300: evaluating on the held-out split, 25 %"
    assert display.progress is not None
    assert "held-out evaluating, 25 %" in " ".join(" ".join(picture(display.progress, 80)).split())
    display.on_eval(EvalReport("sft", 300, 0.5, 200, {}))
    assert "evaluating" not in " ".join(picture(display.progress, 80))
    display.line_every_s = 1e9
    display.on_stage_start("grpo", "grpo", 1, 200, 0)
    for share in (0.0, 0.5):
        display.on_measuring("grpo", 0, share)
    assert out.getvalue().splitlines()[-1] == "sft 300: held-out accuracy 50.0 % of 200 prompts", "a short one has no line"
    display.on_step(StepReport("grpo", 1, METRICS, {}))
    assert out.getvalue().splitlines()[-1].startswith("grpo 1/200"), "nor does it take the first step's"


def test_what_a_reward_model_gets_right_is_shown_in_its_own_stage_alone() -> None:
    display = LiveDisplay(Console(file=io.StringIO()))
    display.on_run_start(RECIPE, Path("runs/x"), 1, None)
    progress = display.progress
    assert progress is not None
    progress.current_stage.add_step(StepReport("sft", 1, {"loss": 0.7, "heldout_pair_accuracy": 0.625}, {}))
    assert "62.5 %" in " ".join(picture(progress, 80))
    assert step_line(progress.current_stage, 0.0).startswith("sft 1/300  loss 0.700  held-out pair accuracy 62.5 %")
    progress.begin("grpo", 1, 200, 0)
    assert "62.5 %" not in " ".join(picture(progress, 80))


def test_a_terminal_gets_a_picture_and_its_cursor_back() -> None:
    out = io.StringIO()
    display = LiveDisplay(Console(file=out, force_terminal=True, width=80, color_system=None))
    middle_of_a_run(display)
    display.on_event("signal", "stopping after this step")
    assert display.live is None
    assert "\x1b[?25h" in out.getvalue()
    display.on_run_end("interrupted")
    assert out.getvalue().rstrip().endswith("stopping after this step")


def test_a_step_costs_the_display_less_than_a_millisecond() -> None:
    display = LiveDisplay(Console(file=io.StringIO(), force_terminal=True, width=80))
    display.on_run_start(RECIPE, Path("runs/arithmetic-1"), 842_112, None)
    display.on_stage_start("grpo", "grpo", 1, 200, 0)
    steps = [StepReport("grpo", n, METRICS, {"sample": 0.6}) for n in range(1, 201)]
    began = time.thread_time()
    for step in steps:
        display.on_step(step)
    spent = time.thread_time() - began
    display.on_run_end("finished")
    assert spent / len(steps) < 1e-3


def test_time_left_counts_only_what_this_process_did() -> None:
    progress = RunProgress.of(RECIPE, Path("runs/x"), 1)
    progress.begin("grpo", 1, 200, 100)
    stage = progress.current_stage
    stage.began = 0.0
    assert stage.left(10.0) is None
    stage.add_step(StepReport("grpo", 110, {}, {}))
    assert stage.left(10.0) == pytest.approx(90.0)


def test_kl_is_the_kl_to_the_reference_and_any_other_has_another_name() -> None:
    assert kl_figure({"kl": 0.25, "update_kl": 0.5}) == ("KL", "0.250")
    assert kl_figure({"update_kl": 0.5}) == ("update KL", "0.500")
    stage = StageProgress("grpo", "grpo", 10, metrics={"reward": 1.0, "update_kl": 0.5})
    assert "update KL 0.500" in step_line(stage, 0.0)
    stage.metrics = {"reward": 1.0, "kl": 0.25, "update_kl": 0.5}
    line = step_line(stage, 0.0)
    assert "  KL 0.250" in line
    assert "0.500" not in line
