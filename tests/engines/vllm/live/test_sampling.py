"""vLLM draws what the native engine would: the same greedy texts, the same distribution, the same records."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from oncurve.engines.base import SampleKey
from oncurve.engines.vllm.engine import VllmEngine
from oncurve.errors import ModelError
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Group, Prompt
from tests.engines.native.plain import assert_logps, engine_for, next_logits, prompt_of
from tests.engines.native.test_turns import Echo
from tests.engines.vllm.live.models import GREEDY, PROMPTS, assert_agree, engine_of, native, plain, policy_of

pytestmark = pytest.mark.vllm
STEP = SampleKey(seed=0, step=1)


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    found = engine_of(policy_of("qwen3"))
    yield found
    found.close()


def bits(groups: list[Group]) -> list[tuple[bytes, bytes, str]]:
    return [(c.token_ids.tobytes(), c.logps.tobytes(), c.stop) for g in groups for c in g.completions]


@pytest.mark.parametrize("name", ["llama_biased", "qwen2"])
def test_greedy_texts_of_other_architectures_are_those_of_the_native_engine(name: str) -> None:
    policy = policy_of(name)
    other = engine_of(policy)
    try:
        assert_agree(policy, other.sample(PROMPTS, 1, GREEDY, STEP), native(policy, PROMPTS, GREEDY))
    finally:
        other.close()


def test_greedy_texts_are_those_of_the_native_engine(engine: VllmEngine) -> None:
    found = engine.sample(PROMPTS, 1, GREEDY, STEP)
    assert_agree(engine.policy, found, native(engine.policy, PROMPTS, GREEDY))
    assert len({c.text for g in found for c in g.completions}) > 1, "all texts are alike: nothing was compared"
    assert all((c.sampled_logps == 0).all() for g in found for c in g.completions)


def test_a_group_sampled_again_is_the_same_and_another_step_differs(engine: VllmEngine) -> None:
    sampling = Sampling(max_new_tokens=24)
    one, two, later = (bits(engine.sample(PROMPTS, 4, sampling, SampleKey(seed=0, step=step))) for step in (1, 1, 2))
    assert one == two
    assert len(set(one)) == len(one), "two samples of a group share their random numbers"
    assert not set(one) & set(later)


def test_each_group_is_reported_once_at_its_index(engine: VllmEngine) -> None:
    reported: list[tuple[int, Group]] = []
    groups = engine.sample(PROMPTS, 3, Sampling(max_new_tokens=8), STEP, on_group=lambda place, g: reported.append((place, g)))
    assert sorted(place for place, _ in reported) == list(range(len(PROMPTS)))
    assert all(groups[place] is group for place, group in reported)
    assert [g.prompt.id for g in groups] == [p.id for p in PROMPTS]


@pytest.mark.parametrize("sampling", [Sampling(max_new_tokens=24), Sampling(max_new_tokens=24, top_k=3, min_p=0.05, top_p=0.9)])
def test_log_probs_of_samples_are_the_models_own(engine: VllmEngine, sampling: Sampling) -> None:
    groups = engine.sample(PROMPTS, 4, sampling, STEP)
    for group in groups:
        for c in group.completions:
            assert_logps(plain(engine.policy), group.prompt_ids, c, 1.0, within=1e-3)
            assert np.isnan(c.sampled_logps).all() == (sampling.top_k > 0)


def test_truncated_samples_keep_to_what_is_left(engine: VllmEngine) -> None:
    groups = engine.sample(PROMPTS, 4, Sampling(max_new_tokens=24, top_k=2), STEP)
    for group in groups:
        for c in group.completions:
            scores_TV = next_logits(plain(engine.policy), group.prompt_ids, c.token_ids)
            second_T = scores_TV.topk(2).values[:, 1]
            drawn_T = scores_TV.gather(1, torch.from_numpy(c.token_ids)[:, None])[:, 0]
            assert (drawn_T >= second_T - 1e-3).all()


def test_the_first_token_is_drawn_as_the_model_would_have_it(engine: VllmEngine) -> None:
    """Pearson's test over 1200 samples of one prompt: seeds of neighbouring samples must not hang together."""
    (group,) = engine.sample([PROMPTS[3]], 1200, Sampling(max_new_tokens=1), STEP)
    share_V = next_logits(plain(engine.policy), group.prompt_ids, group.completions[0].token_ids)[0].softmax(-1)
    seen_V = torch.bincount(torch.tensor([int(c.token_ids[0]) for c in group.completions]), minlength=len(share_V))
    often = share_V * 1200 >= 5
    expected, found = share_V[often] * 1200, seen_V[often].double()
    chi = float(((found - expected) ** 2 / expected).sum())
    degrees = int(often.sum()) - 1
    assert degrees > 3
    assert chi < degrees + 5 * (2 * degrees) ** 0.5, f"{chi:.1f} at {degrees} degrees of freedom"


def test_stop_strings_end_a_completion_as_in_the_native_engine(engine: VllmEngine) -> None:
    whole = native(engine.policy, PROMPTS, GREEDY)
    texts = [text for g in whole if len(text := g.completions[0].text) > 8]
    sampling = GREEDY.model_copy(update={"stop": (texts[0][4:6], texts[1][5])})
    found = engine.sample(PROMPTS, 1, sampling, STEP)
    assert_agree(engine.policy, found, native(engine.policy, PROMPTS, sampling))
    stopped = [g.completions[0] for g in found if g.completions[0].stop == "stop_string"]
    assert stopped
    assert all(c.text.endswith(sampling.stop) and not any(s in c.text[:-1] for s in sampling.stop) for c in stopped)


def test_no_end_token_comes_before_its_time(engine: VllmEngine) -> None:
    sampling = Sampling(max_new_tokens=40, min_new_tokens=12)
    found = [c for g in engine.sample(PROMPTS, 8, sampling, STEP) for c in g.completions]
    ended = [c for c in found if c.stop == "end"]
    assert ended
    assert all(len(c.token_ids) > 12 and int(c.token_ids[-1]) in engine.policy.eos_ids for c in ended)
    assert all(not set(c.token_ids[:12].tolist()) & set(engine.policy.eos_ids) for c in found)
    greedy = GREEDY.model_copy(update={"min_new_tokens": 12})
    assert_agree(engine.policy, engine.sample(PROMPTS, 1, greedy, STEP), native(engine.policy, PROMPTS, greedy))


def test_what_is_too_long_is_refused_in_the_native_engines_words(engine: VllmEngine) -> None:
    long = prompt_of(500)
    messages = []
    for sample in (engine.sample, engine_for(engine.policy, 8).sample):
        with pytest.raises(ModelError) as caught:
            sample([PROMPTS[0], long], 1, GREEDY, STEP)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert engine.sample([PROMPTS[0]], 1, GREEDY, STEP)


def test_an_empty_completion_is_an_end_token_and_no_text(engine: VllmEngine) -> None:
    """A prompt after which the model ends at once: found by trying, as the native engine says."""
    sampling = Sampling(max_new_tokens=4)
    tried = [c for g in engine.sample(PROMPTS, 64, sampling, STEP) for c in g.completions]
    empty = [c for c in tried if c.text == "" and c.stop == "end"]
    assert empty
    assert all(c.token_ids.tolist() == [c.token_ids[0]] and int(c.token_ids[0]) in engine.policy.eos_ids for c in empty)
    assert all(c.length == 1 for c in empty)


def test_an_environment_answers_back(engine: VllmEngine) -> None:
    """Turn by turn as in the native engine: what it received, what is in the loss, and the tokens."""
    sampling = GREEDY.model_copy(update={"max_new_tokens": 60})
    letter = next(c for c in native(engine.policy, PROMPTS[:1], sampling)[0].completions).text[3]
    ours, theirs = Echo(calls=(letter,)), Echo(calls=(letter,))
    prompts = [[Prompt(id=p.id, text=p.text, environment=echo) for p in PROMPTS[:4]] for echo in (ours, theirs)]
    found, expected = engine.sample(prompts[0], 1, sampling, STEP), native(engine.policy, prompts[1], sampling)
    for a, b in zip(found, expected, strict=True):
        one, other = a.completions[0], b.completions[0]
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.loss_mask.tolist() == other.loss_mask.tolist()
        assert (one.text, one.stop) == (other.text, other.stop)
        assert np.abs(one.logps - other.logps).max() < 1e-3
    assert any(not c.loss_mask.all() for g in found for c in g.completions), "nobody answered"
    assert sorted(ours.received) == sorted(theirs.received)


def test_another_temperature_scales_the_log_probs(engine: VllmEngine) -> None:
    """The last test here: vLLM starts again, to tell the other kind of log-probs."""
    before = engine.pid
    groups = engine.sample(PROMPTS, 2, Sampling(temperature=0.7, max_new_tokens=24), STEP)
    assert engine.pid != before
    for group in groups:
        for c in group.completions:
            expected = (next_logits(plain(engine.policy), group.prompt_ids, c.token_ids) / 0.7).log_softmax(-1)
            at = expected.gather(1, torch.from_numpy(c.token_ids)[:, None])[:, 0]
            assert float((torch.from_numpy(c.logps) - at).abs().max()) < 1e-3
            assert np.isnan(c.raw_logps).all()
    assert_agree(engine.policy, engine.sample(PROMPTS, 1, GREEDY, STEP), native(engine.policy, PROMPTS, GREEDY))
