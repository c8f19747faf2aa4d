"""Training with an environment: its tokens do not count in the loss or any metric, and a crashed run resumes exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from oncurve.models.chat_template import encode_example
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import Sft
from oncurve.records import Completion, Example, GradedGroup, Prompt, ScoredCompletion, ScoredGroup, StepReport
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.training.learner.learner import Learner
from oncurve.training.listeners import Listener
from oncurve.training.stages.grpo import grpo_learner_settings
from oncurve.training.stages.sft import SftLoop
from oncurve.training.start import begin, resume
from tests.training.builders import graded_group, policy, snapshot, stage
from tests.training.test_trainer import fingerprint

SMALL = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "head_size": 16, "mlp_width": 48, "context": 64}


def played(steps: int = 4) -> Recipe:
    """The guessing game, on the smallest model."""
    grpo = {"type": "grpo", "steps": steps, "prompts_per_step": 3, "group_size": 4, "save_every": 2, "eval_every": 3}
    tuned = {"sampling": {"max_new_tokens": 24}, "optimiser": {"learning_rate": 1e-3}, "kl": {"beta": 0.02}}
    options = {
        "name": "played", "threads": 1, "model": {"tiny": SMALL}, "task": {"type": "guess", "heldout": 10, "examples": 20},
        "rewards": [{"type": "guess"}], "stages": [{"type": "sft", "steps": 30}, {**grpo, **tuned}],
    }  # fmt: skip
    return parse_recipe(options, [])


class Crash(Listener):
    """Ends the process, as far as a test can, right after a step was recorded."""

    def __init__(self, stage: str, step: int) -> None:
        self.place = (stage, step)

    def on_step(self, report: StepReport) -> None:
        if (report.stage, report.step) == self.place:
            raise SystemExit(1)


def test_a_run_with_an_environment_that_crashed_ends_in_the_same_bits(tmp_path: Path) -> None:
    full = begin(played(), out=tmp_path / "whole")
    with pytest.raises(SystemExit):
        begin(played(), out=tmp_path / "crashed", listeners=[Crash("grpo", 3)])
    assert fingerprint(resume(RunFolder(tmp_path / "crashed"))) == fingerprint(full)
    with RunReader.open(full.path) as store:
        rows = [c for n in range(3) for c in store.group("grpo", 4, n).graded.group.completions]
        measured = store.evals()[-1]
    masks = [c.loss_mask for c in rows]
    assert any(not mask.all() for mask in masks), "the game has answered, and the store says which tokens are its own"
    assert all(mask[0] for mask in masks)
    assert measured.asked == 10


def with_garbage(graded: GradedGroup, dice: np.random.Generator) -> GradedGroup:
    """The same group with other log-probs and advantages at the environment's tokens."""

    def spoilt(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return np.where(mask, values, dice.normal(size=len(values)) * 50).astype(np.float32)

    def completion(c: Completion) -> Completion:
        return replace(c, logps=spoilt(c.logps, c.loss_mask))

    scored = tuple(ScoredCompletion(completion(s.completion), s.aspects) for s in graded.scored.scored)
    group = replace(graded.group, completions=tuple(s.completion for s in scored))
    advantages = [spoilt(a, s.completion.loss_mask) for a, s in zip(graded.advantages, scored, strict=True)]
    return GradedGroup(ScoredGroup(group, scored), tuple(advantages), graded.graded)


@pytest.mark.parametrize("objective", ["grpo", "gspo", "dapo", "grpo_sequence"])
def test_tokens_of_an_environment_count_nowhere(objective: str) -> None:
    """Not in the gradient, nor in any metric: mismatch, KL, ratios, entropy, clipping."""

    def learned(spoil: bool) -> tuple[dict[str, float], torch.Tensor]:
        rng = np.random.default_rng(0)
        groups = [graded_group(rng, 3, [7, 9, 6], masked=True, name=f"p{i}") for i in range(3)]
        copy = policy()
        options = {"kl": {"beta": 0.1}, "updates_per_step": 2, "importance_cap": 2.0, "optimiser": {"learning_rate": 1e-2}}
        learner = Learner(copy, grpo_learner_settings(stage(objective=objective, **options)))
        report = learner.update([with_garbage(g, rng) for g in groups] if spoil else groups)
        by_the_clock = {"update_tflops", "mfu"}
        return {name: value for name, value in report.metrics.items() if name not in by_the_clock}, snapshot(copy.model)

    (plain, weights), (spoilt, same) = learned(False), learned(True)
    assert torch.equal(weights, same)
    assert plain == spoilt
    assert plain["mismatch_max"] < 50


def test_demonstrations_teach_only_the_tokens_of_the_policy() -> None:
    """The loss is the mean over the tokens of the policy's turns; the game's tokens need not be learned."""
    prompt = Prompt("p", "1+1=")
    turns = ("12", "3456789", "00")
    student = policy()
    task = PromptList((prompt,), examples=(Example(prompt, "".join(turns), turns),))
    loop = SftLoop(Sft(steps=1, batch_size=1), 0, task, student)
    ids, wrote = encode_example(student, task.examples[0])
    with torch.no_grad():
        full = torch.from_numpy(np.concatenate((student.encode(prompt), ids)))[None]
        student.model.set_attn_implementation("eager")
        logp_TV = student.model(input_ids=full).logits[0, -len(ids) - 1 : -1].log_softmax(-1)
        student.model.set_attn_implementation("oncurve")
    logps = logp_TV[torch.arange(len(ids)), torch.from_numpy(ids)].numpy()
    report = loop.step(1)
    assert int(wrote.sum()) == 5
    assert report.metrics["loss"] == pytest.approx(-logps[wrote].mean(), abs=1e-5)
    assert report.metrics["tokens"] == 5
