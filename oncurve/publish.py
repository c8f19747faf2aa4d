"""`oncurve publish`: a run's model on the Hugging Face hub, with a model card made from what the run recorded.

The card has the recipe, the curve, held-out results with 95 % intervals, versions, and the base model with its licence. The
files are the exported model, the card (README.md), `recipe.toml` and `curve.svg`. huggingface_hub is imported when a model is
published.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oncurve import trust
from oncurve.errors import RunError
from oncurve.operations.run_model import export
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.validate import FROM_PYTHON
from oncurve.records import EvalReport
from oncurve.runs.checkpoints.listing import RunTarget
from oncurve.runs.database.reader import RunReader, StageRow
from oncurve.runs.folder import RunFolder
from oncurve.studio.report import chart
from oncurve.terminal.evaluation import interval_of, reward_interval

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
CHART_STYLE = (
    "<style>text{fill:#7a7f87;font:11px sans-serif}.grid{stroke:#8a8f9740}"
    ".line{stroke:#2b87c2;fill:none;stroke-width:1.8}.dot{fill:#2b87c2}</style>"
)
"""Colours that can be read on a white and on a dark page."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What is sent: the folder's files, and where to. ``address`` is None if nothing was sent."""

    repository: str
    card: str
    files: Sequence[tuple[str, int]]
    address: str | None


def publish(
    source: RunTarget, repository: str, *, licence: str | None, private: bool, dry_run: bool, endpoint: str | None = None
) -> Publication:
    """Exports the model, writes the card and uploads both in one commit. Nothing is sent if ``dry_run`` is set."""
    _check_name(repository)
    with tempfile.TemporaryDirectory(prefix="oncurve-publish-") as temporary:
        folder = Path(temporary) / "model"
        export(source, folder)
        card = model_card(source, repository, licence)
        (folder / "README.md").write_text(card, encoding="utf-8")
        (folder / "recipe.toml").write_bytes(source.run.recipe.read_bytes())
        curve = reward_curve(source.run)
        if curve is not None:
            (folder / "curve.svg").write_text(curve, encoding="utf-8")
        files = [(str(path.relative_to(folder)), path.stat().st_size) for path in sorted(folder.rglob("*")) if path.is_file()]
        address = None if dry_run else _upload(folder, repository, private, endpoint, source.name)
    return Publication(repository, card, files, address)


def _check_name(repository: str) -> None:
    """The hub's own rules, which a dry run checks too."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    because = "the hub names them OWNER/NAME"
    if REPOSITORY.fullmatch(repository):
        try:
            validate_repo_id(repository)
        except HFValidationError as error:
            because = str(error)
        else:
            return
    raise RunError(repository, "not a repository", because=because, fix="such as me/my-model")


def _upload(folder: Path, repository: str, private: bool, endpoint: str | None, name: str) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api = HfApi(endpoint=endpoint, library_name="oncurve")
    try:
        address = str(api.create_repo(repository, private=private, exist_ok=True))
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"{name}, by oncurve publish")
    except LocalTokenNotFoundError as error:
        raise RunError(
            repository, "not logged in", because="the hub needs a token", fix="hf auth login, or set HF_TOKEN"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        fix = "hf auth login with a token that may write, and check the owner's name" if status in (401, 403) else "try again"
        raise RunError(repository, "the hub refused it", because=str(error).strip().partition("\n")[0], fix=fix) from error
    except Exception as error:
        # The HTTP client is huggingface_hub's own choice, and differs between its versions.
        if not isinstance(error, OSError) and all(kind.__name__ != "TransportError" for kind in type(error).__mro__):
            raise
        raise RunError(
            repository,
            "the hub can't be reached",
            because=str(error).strip().partition("\n")[0] or type(error).__name__,
            fix="check the network, or look at everything offline with --dry-run",
        ) from error
    return address


def model_card(source: RunTarget, repository: str, licence: str | None = None) -> str:
    """The card of a run's model, in Markdown with the hub's metadata."""
    run = source.run
    recipe = trust.load_recipe_of(run)
    with RunReader.open(run.path) as store:
        stages, evals = store.stages(), store.evals()
    base = recipe.model.source
    is_hub_id = bool(REPOSITORY.fullmatch(base)) and not Path(base).exists()
    licence = licence or licence_of(base)
    head = ["library_name: transformers", "pipeline_tag: text-generation", "tags:", "- oncurve"]
    head += sorted({f"- {stage.type}" for stage in stages})
    head += [f"base_model: {base}"] if is_hub_id else []
    head += [f"license: {licence}"] if licence else []
    parts = [
        "---\n" + "\n".join(head) + "\n---",
        f"# {repository.partition('/')[2]}",
        _about(source, recipe, stages, base, licence),
        "## Held-out results",
        results_table(evals),
    ]
    if reward_curve(run) is not None:
        parts.append("## Training\n\n![Mean reward of each step](curve.svg)")
    how = "`oncurve train recipe.toml` with the recipe below, which has every default."
    if recipe.task.type == FROM_PYTHON:
        how = "Prompts and rewards came from a Python program (`oncurve.train`). The recipe below has all settings."
    versions = ", ".join(f"{name} {version}" for name, version in run.state().environment.items())
    parts += [
        "## Use",
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{repository}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{repository}")\n```',
        "## Reproduce",
        f"{how} Versions: {versions}.",
        f"<details><summary>recipe.toml</summary>\n\n```toml\n{run.recipe.read_text(encoding='utf-8').rstrip()}\n```\n\n</details>",
    ]
    return "\n\n".join(parts) + "\n"


def _about(source: RunTarget, recipe: Recipe, stages: Sequence[StageRow], base: str, licence: str | None) -> str:
    model = "a small decoder with random weights" if base == "tiny" else f"`{base}`"
    adapter = "" if recipe.model.lora is None else f", as a LoRA adapter of rank {recipe.model.lora.rank} that is merged here"
    steps = ", then ".join(f"{stage.done} steps of {stage.type}" for stage in stages)
    rewards = ", ".join(f"`{reward.name or reward.type}`" for reward in recipe.rewards)
    terms = f"The base model's licence is {licence}." if licence else "The licence of the base model is not known here."
    return (
        f"{model} trained with [Oncurve](https://pypi.org/project/oncurve/){adapter}: {steps}. Task: `{recipe.task.type}`. "
        f"Rewards: {rewards or 'none'}. This is `{source.name}`. {'' if base == 'tiny' and not licence else terms}"
    ).rstrip()


def results_table(evals: Sequence[EvalReport]) -> str:
    """Each evaluation with its 95 % interval."""
    if not evals:
        return "Nothing was held out."
    has_accuracy = any(report.accuracy is not None for report in evals)
    rows = [
        f"| stage | step | {'accuracy' if has_accuracy else 'mean reward'} | 95 % interval | prompts |",
        "|---|---|---|---|---|",
    ]
    for report in evals:
        if report.accuracy is not None:
            low, high = interval_of(report.accuracy * report.asked, report.asked, 1)
            value, interval = f"{100 * report.accuracy:.1f} %", f"{100 * low:.1f} – {100 * high:.1f} %"
        else:
            ends = reward_interval(report)
            value = "–" if report.reward is None else f"{report.reward:.3f}"
            interval = "–" if ends is None else f"{ends[0]:.3f} – {ends[1]:.3f}"
        rows.append(f"| {report.stage} | {report.step} | {value} | {interval} | {report.asked} |")
    return "\n".join(rows)


def reward_curve(run: RunFolder) -> str | None:
    """The mean reward of each step of the last stage that has one, as SVG; None if no stage has rewards."""
    with RunReader.open(run.path) as store:
        curves = (store.metric("reward", stage.name) for stage in reversed(store.stages()))
        points = next((curve for curve in curves if curve), None)
    if points is None:
        return None
    head, _, body = chart("mean reward", points).partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg">{CHART_STYLE}{body}\n'


def licence_of(base: str) -> str | None:
    """The licence that a local base model's card names."""
    card = Path(base) / "README.md"
    if not card.is_file():
        return None
    found = re.search(
        r"\A---\n.*?^license: *([\w.-]+)\s*$.*?^---", card.read_text("utf-8", "replace"), re.MULTILINE | re.DOTALL
    )
    return found[1] if found else None
