"""How far sampler and learner of a mixture of experts are apart, with and without routing replay.

    python bench/routing_replay.py --table             writes bench/results/routing_replay.json and the table in docs/models.md
    python bench/routing_replay.py --out gpu.json      writes that file only

It runs on a GPU if there is one; the table is for a CPU.

A Qwen3-MoE of 4 layers with 16 experts, of which a token takes 2, is trained by SFT on arithmetic until its routers are no
longer uniform. Then it samples, and the learner computes the log-probs of what it sampled: in bfloat16 through other shapes
than the sampler's, as in any run on a GPU, or in float32 after a sampler in bfloat16. Nothing is updated.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reporting import commit, put
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.models import experts
from oncurve.models.experts import RoutingPass
from oncurve.models.loading.load import build_tokenizer, load_policy
from oncurve.models.packing import build_pack
from oncurve.models.policy import Policy
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.model import Model
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.recipe.schema.stages import Grpo
from oncurve.records import Aspect, GradedGroup, Group, ScoredCompletion, ScoredGroup
from oncurve.tasks.prompt_order import prompts_for_step
from oncurve.tasks.registry import build_task
from oncurve.training.learner.learner import Learner, prefix_group_of
from oncurve.training.stages.grpo import grpo_learner_settings
from oncurve.training.start import begin

RESULTS = Path(__file__).resolve().parent / "results" / "routing_replay.json"
DOCS = Path(__file__).resolve().parents[1] / "docs" / "models.md"
LAYERS, EXPERTS, CHOSEN = 4, 16, 2
PROMPTS, GROUP = 32, 8
RECIPE = """
name = "mixture"
threads = 1
[task]
type = "arithmetic"
digits = 2
heldout = 50
[[rewards]]
type = "answer"
[[stages]]
type = "sft"
batch_size = 64
"""


def recipe_for(source: Path, steps: int) -> Recipe:
    return parse_recipe(tomllib.loads(RECIPE), (f"model.source={source}", f"sft.steps={steps}"))


def save_random_mixture(folder: Path, alphabet: str) -> None:
    tokens = build_tokenizer(alphabet)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokens), hidden_size=96, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, num_experts=EXPERTS, num_experts_per_tok=CHOSEN,
        norm_topk_prob=True, max_position_embeddings=256, eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id,
    )  # fmt: skip
    Policy(Qwen3MoeForCausalLM(config).float(), tokens).save(folder)


def open_policy(folder: Path, dtype: str) -> Policy:
    return load_policy(Model.model_validate({"source": str(folder), "dtype": dtype}), alphabet="", seed=0)


def sample(policy: Policy, recipe: Recipe) -> list[Group]:
    engine = NativeEngine(policy, Engine(slots=64))
    engine.records_routing = True
    prompts = prompts_for_step(build_task(recipe.task), 0, 0, PROMPTS)
    return engine.sample(prompts, GROUP, Sampling(max_new_tokens=48), SampleKey(0, 1))


def graded(groups: list[Group]) -> list[GradedGroup]:
    """With an advantage of 1 for every token: every completion is forwarded."""
    result = []
    for group in groups:
        scored = tuple(ScoredCompletion(c, (Aspect("a", 0.0),)) for c in group.completions)
        ones = tuple(np.ones(len(c.token_ids), np.float32) for c in group.completions)
        result.append(GradedGroup(ScoredGroup(group, scored), ones, (True,) * len(scored)))
    return result


def rerouted_share(policy: Policy, groups: list[GradedGroup]) -> float:
    """The share of (token, layer) for which the learner's own router chooses another set of experts."""
    other = total = 0
    for g in groups:
        pack = build_pack([prefix_group_of(g.scored, range(GROUP), range(GROUP))], policy.device)
        assert pack.routing_NE is not None
        routing = RoutingPass(records=True)
        with torch.no_grad(), experts.routed(routing):
            policy.pack_hidden(pack)
        ours, theirs = (x.view(-1, LAYERS, CHOSEN).sort(-1).values for x in (routing.chosen_NE, pack.routing_NE))
        other, total = other + int((ours != theirs).any(-1).sum()), total + ours.shape[0] * LAYERS
    return other / total


def measure(policy: Policy, groups: list[GradedGroup], *, replays: bool) -> dict[str, float]:
    stage = Grpo.model_validate({"routing_replay": replays, "optimiser": {"learning_rate": 1e-30}, "no_signal": "keep"})
    metrics = Learner(policy, grpo_learner_settings(stage)).update(groups).metrics
    return {name: metrics[name] for name in ("mismatch_kl", "mismatch_max")}


def expert_shares(groups: list[Group]) -> list[float]:
    """The share of the completions' tokens that take the most used and the least used expert, on average over layers."""
    routing = np.concatenate([c.routing for g in groups for c in g.completions if c.routing is not None])
    by_layer = routing.reshape(len(routing), LAYERS, CHOSEN)
    counts = [np.bincount(by_layer[:, layer].flatten(), minlength=EXPERTS) / len(routing) for layer in range(LAYERS)]
    return [float(np.mean([c.max() for c in counts])), float(np.mean([c.min() for c in counts]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="SFT steps")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="write the table in docs/models.md too")
    args = parser.parse_args()
    steps = args.steps
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        random, trained = Path(temporary) / "random", Path(temporary) / "run"
        recipe = recipe_for(random, steps)
        save_random_mixture(random, build_task(recipe.task).alphabet or "")
        begin(recipe, out=trained)
        rows: list[dict[str, Any]] = []
        for folder, name in ((random, "random"), (trained / "model", "after SFT")):
            for sampler, learner in (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")):
                groups = sample(open_policy(folder, sampler), recipe)
                policy, of_step = open_policy(folder, learner), graded(groups)
                row: dict[str, Any] = {
                    "weights": name,
                    "sampler": sampler,
                    "learner": learner,
                    "expert_shares": expert_shares(groups),
                }
                row |= {"rerouted_share": rerouted_share(policy, of_step)}
                row |= {"without": measure(policy, of_step, replays=False), "with": measure(policy, of_step, replays=True)}
                rows.append(row)
                print(json.dumps(row), flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, 1 thread"
    report = {"commit": commit(), "device": device, "torch": torch.__version__, "sft_steps": steps, "rows": rows}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.table:
        put(DOCS, "routing-replay", table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    heads = ["weights", "load of experts", "sampler", "learner", "rerouted", "`mismatch_kl`", "with replay", "`mismatch_max`"]
    lines = [f"| {' | '.join(heads)} | with replay |", "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        figures = [row[kind][name] for name in ("mismatch_kl", "mismatch_max") for kind in ("without", "with")]
        most, least = row["expert_shares"]
        cells = [row["weights"], f"{100 * least:.1f} to {100 * most:.1f} %", row["sampler"], row["learner"]]
        cells += [f"{100 * row['rerouted_share']:.2f} %", *(f"{x:.1e}" for x in figures)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
