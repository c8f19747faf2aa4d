"""`grpo.carry_over`: unfinished groups continue in the next step, with its weights."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from oncurve.engines.base import BegunCompletion, SampleKey, SampleRequest
from oncurve.engines.native.c_decoder import CRunner
from oncurve.engines.native.engine import NativeEngine
from oncurve.engines.native.torch_runner import TorchRunner
from oncurve.errors import OncurveError
from oncurve.models.policy import Policy
from oncurve.operations.replay import replay
from oncurve.recipe.defaults import seed_for_stage
from oncurve.recipe.schema.sections import Draft, Engine, Sampling
from oncurve.records import Completion, Group, Prompt, StepReport
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.tasks.prompt_order import prompts_for_step
from oncurve.training.stages.grpo import GrpoLoop
from oncurve.training.start import begin, task_for, with_machine_defaults
from tests.engines.native.plain import next_logits, prompt_of
from tests.models.architectures import make_model, shake, tokenizer
from tests.training.builders import recipe

PROMPTS = [prompt_of(n, name) for name, n in zip("abcd", (1, 9, 66, 20), strict=True)]
SAMPLING = Sampling(max_new_tokens=70)
GROUP = 3


def policies() -> dict[str, Policy]:
    """One for each runner that can continue: C, and torch with a fast backbone and through modules."""
    return {
        "C": Policy(make_model("qwen3"), tokenizer()),
        "torch": Policy(make_model("qwen3"), tokenizer(), compiled=False),
        "modules": Policy(make_model("gemma2"), tokenizer()),
    }


def with_ends(policy: Policy) -> Policy:
    """Some letters end a completion too, so that lengths differ."""
    policy.eos_ids = (*policy.eos_ids, 5, 11)
    return policy


def requests_for(policy: Policy, prompts: list[Prompt], begun: dict[int, tuple[BegunCompletion, ...]]) -> list[SampleRequest]:
    key = SampleKey(0, 1)
    return [SampleRequest(p, policy.encode(p), GROUP, SAMPLING, key, begun=begun.get(i, ())) for i, p in enumerate(prompts)]


def in_parts(engine: NativeEngine, prompts: list[Prompt], parts: tuple[int, ...]) -> list[Group]:
    """Sampled by one call after the other, each of which completes so many groups."""
    groups: dict[int, Group] = {}
    begun: dict[int, tuple[BegunCompletion, ...]] = {}
    for version, enough in enumerate(parts):
        numbers = [i for i in range(len(prompts)) if i not in groups]
        requests = requests_for(engine.policy, prompts, begun)
        found, rest = engine.sample_until([requests[i] for i in numbers], enough, version)
        assert len(found) == enough
        groups |= {numbers[i]: group for i, group in found.items()}
        begun = {numbers[i]: completions for i, completions in rest.items()}
    assert not begun
    return [groups[i] for i in range(len(prompts))]


@pytest.mark.parametrize("name", ["C", "torch", "modules"])
@pytest.mark.parametrize("draft", ["off", "group"])
def test_parts_of_a_completion_are_those_of_one_call(name: str, draft: Draft) -> None:
    """With weights that stay the same. In C the bits are too: a row is computed in the same order in a prefill."""
    policy = with_ends(policies()[name])
    engine = NativeEngine(policy, Engine(slots=6, check_every=2, draft=draft))
    runner = engine.build_runner(requests_for(policy, PROMPTS, {}))
    assert type(runner) is (CRunner if name == "C" else TorchRunner)
    expected = engine.sample(PROMPTS, GROUP, SAMPLING, SampleKey(0, 1))
    for parts in ((1, 1, 1, 1), (2, 2), (4,), (1, 3)):
        for group, whole in zip(in_parts(engine, PROMPTS, parts), expected, strict=True):
            for a, b in zip(group.completions, whole.completions, strict=True):
                assert a.token_ids.tolist() == b.token_ids.tolist()
                assert (a.stop, a.text) == (b.stop, b.text)
                if name == "C":
                    assert a.logps.tobytes() == b.logps.tobytes()
                assert float(np.abs(a.logps - b.logps).max()) < 1e-4


def assert_logps_of(model: torch.nn.Module, group: Group, completion: Completion, first: int, end: int) -> None:
    logits_TV = next_logits(model, group.prompt_ids, completion.token_ids)[first:end]
    at = torch.from_numpy(completion.token_ids[first:end])[:, None]
    expected = logits_TV.log_softmax(-1).gather(1, at)[:, 0]
    assert float((torch.from_numpy(completion.logps[first:end]) - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("name", ["C", "torch"])
def test_each_token_has_the_log_prob_of_the_weights_that_sampled_it(name: str) -> None:
    """The weights change between two calls; the KV cache of what was sampled before is that of the new ones."""
    policy = with_ends(policies()[name])
    plain = [make_model("qwen3"), make_model("qwen3")]
    shake(plain[1], seed=3)
    engine = NativeEngine(policy, Engine(slots=12, check_every=2))
    requests = requests_for(policy, PROMPTS, {})
    _, begun = engine.sample_until(requests, 1, version=4)
    shake(policy.model, seed=3)
    numbers = sorted(begun)
    requests = requests_for(policy, PROMPTS, begun)
    groups, rest = engine.sample_until([requests[i] for i in numbers], len(numbers), version=5)
    assert not rest
    ages = Counter[int]()
    for group in groups.values():
        for completion in group.completions:
            assert completion.versions is not None
            spans = [*completion.versions, (len(completion.token_ids), -1)]
            for (first, version), (end, _) in pairwise(spans):
                assert_logps_of(plain[version - 4], group, completion, first, end)
                ages[version] += end - first
    assert ages[4] > 20
    assert ages[5] > 20


def run_of(folder: Path, *sets: str) -> RunFolder:
    options = ("grpo.steps=5", "grpo.carry_over=1", "grpo.sampling.max_new_tokens=24", "grpo.save_every=2", "engine.slots=12")
    return begin(recipe(*options, 'grpo.sampling.stop=["1","3"]', *sets), out=folder)


def test_a_run_trains_on_every_group_once_and_records_its_weights(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    with RunReader.open(run.path) as store:
        reports = [store.step("grpo", n) for n in range(1, 6)]
        versions = [store.versions("grpo", n) for n in range(1, 6)]
    assert [len(report.groups) for report in reports] == [2, 3, 3, 3, 4]
    assert [report.metrics["carried_groups"] for report in reports] == [1, 1, 1, 1, 0]
    prompts = [group.group.prompt.id for report in reports for group in report.groups]
    task, seed = task_for(recipe(), recipe().stages[1]), seed_for_stage(recipe(), recipe().stages[1])
    assert Counter(prompts) == Counter(p.id for n in range(5) for p in prompts_for_step(task, seed, n, 3))
    older = 0
    for n, (report, of_step) in enumerate(zip(reports, versions, strict=True), start=1):
        assert len(of_step) == 4 * len(report.groups), "each completion says which weights sampled it"
        assert all(version <= n - 1 for spans in of_step.values() for _, version in spans)
        older += sum(len(spans) > 1 for spans in of_step.values())
        assert (report.metrics["staleness_max"] > 0) == any(v < n - 1 for spans in of_step.values() for _, v in spans)
    assert older > 0, "some completions have tokens of two versions"
    assert replay(run, "grpo", 4, 1).differences == [], "from the checkpoint of step 2, with what it carries over"


def test_a_replay_looks_for_drafts_in_the_answers_that_the_run_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which group is complete first depends on the drafts that are accepted."""
    answers: dict[int, dict[str, list[list[int]]]] = {}
    step = GrpoLoop.step

    def watched(self: GrpoLoop, n: int) -> StepReport:
        answers[n] = {prompt: [a.tolist() for a in of_prompt] for prompt, of_prompt in self.engine.answers.items()}
        return step(self, n)

    monkeypatch.setattr(GrpoLoop, "step", watched)
    run = run_of(tmp_path / "run", 'engine.draft="group"', "grpo.steps=3")
    expected = dict(answers)
    answers.clear()
    assert replay(run, "grpo", 3, 0).differences == []
    assert answers == {3: expected[3]}
    assert len(expected[3]) > len(expected[1]), "and those of steps 1 and 2"


def test_the_importance_correction_is_on_by_default() -> None:
    assert with_machine_defaults(recipe("grpo.carry_over=1")).stages[1].importance_cap == 2.0  # type: ignore[union-attr]
    assert with_machine_defaults(recipe()).stages[1].importance_cap is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("grpo.carry_over=3",), "would train on none"),
        (("grpo.carry_over=1", "grpo.no_signal=resample"), "no_signal"),
        (("grpo.carry_over=1", "grpo.curriculum.unseen=0.5"), "curriculum"),
        (("grpo.carry_over=1", "scale.ranks=2"), "ranks"),
        (("grpo.carry_over=1", "grpo.task.type=guess"), "environment"),
    ],
)
def test_what_it_does_not_support_is_refused(sets: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(OncurveError, match=message):
        begin(recipe(*sets), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
