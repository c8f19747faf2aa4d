"""What Oncurve and TRL, installed next to it, do on the same input in situations that have gone wrong in trainers.

    pip install trl==1.16.0 datasets peft
    python bench/faults.py

Both get each question with the same tiny model, prompts and rewards, on a CPU. docs/faults.md quotes the table.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

import oncurve
from oncurve.models.loading.load import build_model, load_policy
from oncurve.operations.run_model import export
from oncurve.recipe.schema.model import Model, TinyModel
from oncurve.runs.checkpoints.listing import open_target

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
SHAPE = TinyModel(layers=2, width=64, heads=2, kv_heads=1, head_size=32, mlp_width=128, context=96)
PROMPTS, GROUP, TOKENS, RATE, ADAPTER_RATE = 4, 4, 48, 1e-3, 1e-1


def early_digits(completions: Sequence[str], **_: object) -> list[float]:
    """Differs within nearly every group, also of an untrained model."""
    return [sum(letter.isdigit() for letter in text[:8]) / 8 for text in completions]


def fails_on_plus(completions: Sequence[str], **_: object) -> list[float]:
    """1, or NaN for a completion with a plus in it: a failure, as of a division or a logarithm."""
    return [math.nan if "+" in text else 1.0 for text in completions]


class Stop(TrainerCallback):  # type: ignore[misc]
    """Ends a training after two steps, as a kill between steps would."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


Weights = dict[str, torch.Tensor]


def train_trl(
    model: Path,
    folder: Path,
    rewards: list[Callable[..., Any]],
    trainer_class: type[GRPOTrainer] = GRPOTrainer,
    *,
    rows: Sequence[Any] = ROWS,
    resume: str | None = None,
    stop: bool = False,
    peft_config: LoraConfig | None = None,
    tools: list[Callable[..., Any]] | None = None,
    **options: Any,
) -> GRPOTrainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": PROMPTS * GROUP,
        "num_generations": GROUP,
        "max_completion_length": TOKENS,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "loss_type": "grpo",
        "beta": 0.0,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "bf16": False,
        "use_cpu": True,
        "seed": 0,
    }
    trainer = trainer_class(
        str(model),
        rewards,
        args=GRPOConfig(**(settings | options)),
        peft_config=peft_config,
        tools=tools,
        train_dataset=Dataset.from_list(list(rows)),
        callbacks=[Stop()] if stop else None,
    )
    trainer.remove_callback(PrinterCallback)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except KeyboardInterrupt:
        assert stop
    return trainer


def train_oncurve(
    model: Path, folder: Path, rewards: list[Callable[..., Any]], stop: bool = False, **options: Any
) -> oncurve.Run:
    try:
        return oncurve.train(
            model=str(model),
            rewards=rewards,
            prompts_per_step=PROMPTS,
            group_size=GROUP,
            out=folder,
            quiet=True,
            threads=1,
            callbacks=[Stop()] if stop else [],
            **{
                "prompts": ROWS,
                "steps": 4,
                "save_every": 1,
                "sampling": {"max_new_tokens": TOKENS},
                "optimiser": {"learning_rate": RATE},
                **options,
            },
        )
    except KeyboardInterrupt:
        return oncurve.Run.open(folder)


def weights_of_trl(trainer: GRPOTrainer) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.named_parameters()}


def weights_of_run(run: oncurve.Run) -> Weights:
    return load_file(run.model_path / "model.safetensors")


def distance(first: Weights, second: Weights) -> str:
    difference = max(float((first[name] - second[name]).abs().max()) for name in first)
    return "the same bits" if difference == 0 else f"weights differ by up to {difference:.1e}"


def repeats(model: Path, folder: Path) -> tuple[str, str]:
    """Do two runs with the same seed end with the same weights?"""
    theirs = [weights_of_trl(train_trl(model, folder / f"trl{i}", [early_digits])) for i in range(2)]
    ours = [weights_of_run(train_oncurve(model, folder / f"own{i}", [early_digits])) for i in range(2)]
    return distance(*theirs), distance(*ours)


def resumes(model: Path, folder: Path) -> tuple[str, str]:
    """Does a run that is stopped after step 2 and resumed end like one that was never stopped?"""
    prompts: list[str] = []

    def noting(completions: Sequence[str], **columns: Any) -> list[float]:
        prompts.extend(columns["prompts"])
        return early_digits(completions)

    complete = weights_of_trl(train_trl(model, folder / "trl", [noting]))
    expected, prompts[:] = list(prompts), []
    train_trl(model, folder / "trl-stopped", [noting], stop=True)
    seen = list(prompts)
    prompts.clear()
    resumed = train_trl(model, folder / "trl-stopped", [noting], resume=str(folder / "trl-stopped" / "checkpoint-1"))
    after = seen[: PROMPTS * GROUP] + prompts  # the second step was not saved, and is done again
    same = (
        "the same prompts"
        if after == expected
        else f"{sum(a != b for a, b in zip(after, expected, strict=False))} other prompts"
    )
    theirs = f"{same}, {distance(complete, weights_of_trl(resumed))}"
    whole = train_oncurve(model, folder / "own", [early_digits])
    train_oncurve(model, folder / "own-stopped", [early_digits], stop=True)
    again = oncurve.train(resume=folder / "own-stopped", prompts=ROWS, rewards=[early_digits], quiet=True)
    shown = [[g.group.prompt.shown for n in range(1, 5) for g in run.groups(n)] for run in (whole, again)]
    same = "the same prompts" if shown[0] == shown[1] else "other prompts"
    return theirs, f"{same}, {distance(weights_of_run(whole), weights_of_run(again))}"


def accumulates(model: Path, folder: Path) -> tuple[str, str]:
    """Does the gradient depend on how the step is split into micro-batches?"""
    norms: dict[str, list[float]] = {}
    for loss in ("grpo", "bnpo", "dr_grpo", "dapo"):
        for micro in (16, 4):
            options: dict[str, Any] = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": 16 // micro}
            trainer = train_trl(model, folder / f"{loss}-{micro}", [early_digits], max_steps=1, loss_type=loss, **options)
            norms.setdefault(loss, []).append(trainer.state.log_history[0]["grad_norm"])
    theirs = ", ".join(f"{loss} {abs(split / whole - 1):.0e}" for loss, (whole, split) in norms.items())
    ours = []
    for objective in ("grpo", "bnpo", "dr_grpo", "dapo"):
        runs = [
            train_oncurve(
                model, folder / f"{objective}-own-{size}", [early_digits], steps=1, objective=objective, tokens_per_pack=size
            )
            for size in (100_000, 128)
        ]
        whole, split = (run.metrics("grad_norm")[0][1] for run in runs)
        ours.append(f"{objective} {abs(split / whole - 1):.0e}")
    return theirs, ", ".join(ours)


def scores(model: Path, folder: Path) -> tuple[str, str]:
    """What does a completion get if one of its two rewards could not be computed?"""
    trainer = train_trl(model, folder / "trl", [early_digits, fails_on_plus], max_steps=1)
    failed = [index for index, value in enumerate(trainer._logs["rewards"]["fails_on_plus"]) if value != value]
    advantages = list(trainer._logs["advantages"])
    mean = sum(advantages[index] for index in failed) / len(failed)
    theirs = f"{len(failed)} of {len(advantages)} failed; their mean advantage is {mean:+.2f}"
    run = train_oncurve(model, folder / "own", [early_digits, fails_on_plus], steps=1, max_failure_share=1.0)
    frame = run.groups(step=1).to_pandas()
    lost = frame[frame["failure"].notna()]
    in_update = int(lost["advantage"].fillna(0.0).ne(0.0).sum())
    return (
        theirs,
        f"{len(lost)} of {len(frame)} failed; {in_update} of them have an advantage: they are left out of their groups",
    )


def samples_from_adapter(model: Path, folder: Path) -> tuple[str, str]:
    """Does the fourth step sample from the adapter that the first three have trained?"""
    batches: list[tuple[list[str], list[list[int]]]] = []

    def noting(completions: Sequence[str], **columns: Any) -> list[float]:
        batches.append((columns["prompts"], columns["completion_ids"]))
        return early_digits(completions)

    adapter = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    train_trl(model, folder / "trl", [noting], learning_rate=ADAPTER_RATE, peft_config=adapter)
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(folder / "trl" / "checkpoint-3"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    theirs = [([*tokenizer(prompt)["input_ids"]], ids) for prompt, ids in zip(*batches[3], strict=True)]
    lora = {"rank": 4, "alpha": 8.0}
    run = train_oncurve(model, folder / "own", [early_digits], lora=lora, optimiser={"learning_rate": ADAPTER_RATE})
    export(open_target(f"{run.path}@grpo-3", Path("runs")), folder / "after-3")
    after = AutoModelForCausalLM.from_pretrained(folder / "after-3")
    ours = [(g.group.prompt_ids.tolist(), c.token_ids.tolist()) for g in run.groups(step=4) for c in g.group.completions]
    return _likelihoods(base, adapted, theirs), _likelihoods(base, after, ours)


def _likelihoods(before: Any, after: Any, sampled: list[tuple[list[int], list[int]]]) -> str:
    means = [sum(_mean_logp(m, *pair) for pair in sampled) / len(sampled) for m in (after, before)]
    return f"mean log-prob of its tokens: {means[0]:.2f} under the trained adapter, {means[1]:.2f} under the base"


@torch.no_grad()
def _mean_logp(model: Any, prompt_ids: list[int], token_ids: list[int], mask: list[bool] | None = None) -> float:
    """Of the sampled tokens, by transformers' own forward pass; ``mask`` is False for tokens of a tool."""
    logits = model(torch.tensor([prompt_ids + token_ids])).logits[0, len(prompt_ids) - 1 : -1]
    logps = logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    return float(logps[torch.tensor(mask or [True] * len(token_ids))].mean())


QUESTION = [{"role": "user", "content": "1+2?"}]
CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
OPEN, CLOSE, END = "<tool_call>", "</tool_call>", "<end>"
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "[assistant]",
    "fields": {
        "tool_calls": {
            "open": OPEN,
            "close_pattern": CLOSE,
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": END, "content": "text"},
    },
}


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


class NotingTrainer(GRPOTrainer):  # type: ignore[misc]
    """Keeps what the loss is computed of."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.noted = super()._generate_and_score_completions(inputs)
        return self.noted


def build_caller(folder: Path) -> Any:
    """A model that calls `add` letter by letter, although its tokenizer has tokens for some of the words. Returns the
    tokenizer."""
    words = [word[:end] for word in ("add", "name", "arguments") for end in range(2, len(word) + 1)]
    letters = {token: i for i, token in enumerate(["<pad>", END, OPEN, CLOSE, *map(chr, range(32, 127)), *words])}
    backend = Tokenizer(BPE(letters, [(word[:-1], word[-1]) for word in words]))
    backend.decoder = Fuse()
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in (OPEN, CLOSE)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token=END)
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    turn = [letters[token] for token in (OPEN, *CALL, CLOSE, END, *"[tool]3[assistant]3.", END)]
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    model = build_model(SHAPE.model_copy(update={"context": 256}), tokenizer, 0)
    ids, adam = torch.tensor([[*prompt, *turn]]), torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(800):
        adam.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(ids).logits[0, len(prompt) - 1 : -1], torch.tensor(turn))
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        if loss < 0.0005:
            break
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def keeps_turns(_: Path, folder: Path) -> tuple[str, str]:
    """Does training use the sampled tokens of a tool call, even if the tokenizer would encode the call differently?"""
    caller = folder / "caller"
    tokenizer = build_caller(caller)
    model = AutoModelForCausalLM.from_pretrained(caller)

    def alternate(completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    trainer = train_trl(
        caller, folder / "trl", [alternate], NotingTrainer, rows=[{"prompt": QUESTION}] * 8, tools=[add], max_steps=1,
        max_completion_length=160,
    )  # fmt: skip
    noted = trainer.noted
    theirs = []
    for i in range(len(noted["completion_ids"])):
        prompt = noted["prompt_ids"][i][noted["prompt_mask"][i].bool()].tolist()
        kept = noted["completion_mask"][i].bool()
        theirs.append((prompt, noted["completion_ids"][i][kept].tolist(), noted["tool_mask"][i][kept].bool().tolist()))
    run = train_oncurve(
        caller, folder / "own", [alternate], prompts=[{"prompt": QUESTION}] * 8, tools=[add], steps=1,
        sampling={"max_new_tokens": 160},
    )  # fmt: skip
    ours = [
        (g.group.prompt_ids.tolist(), c.token_ids.tolist(), c.loss_mask.tolist())
        for g in run.groups(step=1)
        for c in g.group.completions
    ]
    return _as_sampled(model, tokenizer, theirs), _as_sampled(model, tokenizer, ours)


def _as_sampled(model: Any, tokenizer: Any, trained: list[tuple[list[int], list[int], list[bool]]]) -> str:
    """What the model thinks of the tokens that are trained, and of those that the tokenizer makes of the same text."""
    with_call = [(prompt, ids, mask) for prompt, ids, mask in trained if not all(mask)]
    logps = [_mean_logp(model, *each) for each in with_call]
    again = [tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"] for _, ids, _ in with_call]
    retokenised = [_mean_logp(model, prompt, ids) for (prompt, _, _), ids in zip(with_call, again, strict=True)]
    return (
        f"{len(with_call)} of {len(trained)} called the tool; mean log-prob of the trained tokens: "
        f"{sum(logps) / len(logps):.3f}, "
        f"and of the same texts tokenised again: {sum(retokenised) / len(retokenised):.3f}"
    )


QUESTIONS = (samples_from_adapter, keeps_turns, accumulates, resumes, repeats, scores)


def main() -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(f"TRL {trl.__version__}, Oncurve {oncurve.__version__}, torch {torch.__version__}\n")
    print("| | TRL | Oncurve |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        load_policy(Model(tiny=SHAPE), alphabet="0123456789+= ", seed=0).save(folder / "model")
        for question in QUESTIONS:
            theirs, ours = question(folder / "model", folder / question.__name__)
            print(f"| {question.__doc__} | {theirs} | {ours} |", flush=True)


if __name__ == "__main__":
    main()
