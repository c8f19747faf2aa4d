"""Writes what the documentation takes from the code: docs/recipes.md, docs/from-trl.md, and the tables of docs/algorithms.md.

python docs/make_pages.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from oncurve.algos.objectives import OBJECTIVES
from oncurve.objective_specs import OBJECTIVE_SPECS
from oncurve.recipe.keys import RecipeKey, section_keys
from oncurve.recipe.schema.stages import STAGE_CLASSES
from oncurve.recipe.schema.base import Section
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.trl.options import TRL_OPTIONS
from oncurve.rewards.registry import REWARDS
from oncurve.runs.metrics import METRICS
from oncurve.tasks.registry import TASKS

DOCS = Path(__file__).resolve().parent
NOTE = "<!-- Written by docs/make_pages.py from the code: change it there. -->"


def pages() -> dict[Path, str]:
    """Every page that has something generated in it, as it should be."""
    algorithms = DOCS / "algorithms.md"
    tables = {"objectives": objectives_table(), "metrics": metrics_table()}
    return {
        DOCS / "recipes.md": recipes_page(),
        DOCS / "from-trl.md": from_trl_page(),
        algorithms: filled(algorithms.read_text(encoding="utf-8"), tables),
    }


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; a bar inside a cell is escaped, so that it stays in its cell."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines)


def filled(text: str, tables: dict[str, str]) -> str:
    """The text with each table between its marks: `<!-- name -->` and `<!-- /name -->`."""
    for name, body in tables.items():
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", rf"\g<1>{_literal(body)}\n\g<2>", text, flags=re.S)
    return text


def _literal(text: str) -> str:
    return text.replace("\\", "\\\\")


def recipes_page() -> str:
    kinds = [("task", name, kind.options) for name, kind in TASKS.items()]
    kinds += [("rewards", name, kind.options) for name, kind in REWARDS.items()]
    parts = [NOTE, "# Recipes: every key", RECIPES_HEAD, keys_table(section_keys(Recipe, ""))]
    for name, stage in STAGE_CLASSES.items():
        parts += [f"## Stages of type `{name}`", doc_of(stage), keys_table(section_keys(stage, f"{name}."))]
    for place, name, options in kinds:
        what = "Task" if place == "task" else "Reward"
        entries = list(section_keys(options, ""))
        parts += [f"## {what} `{name}`", doc_of(options), keys_table(entries) if entries else "No options."]
    return "\n\n".join(parts) + "\n"


def keys_table(entries: Iterable[RecipeKey]) -> str:
    rows = ((f"`{entry.key}`", entry.kind, _default(entry), entry.doc) for entry in entries)
    return table(("key", "takes", "default", "meaning"), rows)


def _default(entry: RecipeKey) -> str:
    if entry.default == "section":
        return "as below"
    return entry.default if entry.default in ("required", "unset") else f"`{entry.default}`"


def doc_of(section: type[Section]) -> str:
    return inspect.cleandoc(section.__doc__ or "")


def from_trl_page() -> str:
    same = [(f"`{name}`", f"`{option.key}`", option.remark) for name, option in TRL_OPTIONS.items() if option.key is not None]
    reasons: dict[str, list[str]] = {}
    for name, option in TRL_OPTIONS.items():
        if option.key is None:
            reasons.setdefault(option.remark, []).append(f"`{name}`")
    none = [(", ".join(names), reason) for reason, names in reasons.items()]
    without = "Each is read by `oncurve recipe from-trl`, which says so if it was set."
    parts = [NOTE, "# From TRL", TRL_HEAD, "## Options with a counterpart", table(("TRL", "recipe", "what differs"), same)]
    parts += ["## Options without one", without, table(("TRL", "why"), none)]
    return "\n\n".join(parts) + "\n"


def objectives_table() -> str:
    rows = []
    for name, spec in OBJECTIVE_SPECS.items():
        parts = [f"`{part}`" for part in str(OBJECTIVES[name]).replace(", dual=None", "").split(" · ")]
        rows.append((f"`{name}`", *parts, spec.baseline, spec.scale, spec.kl_place, spec.sentence, spec.paper))
    head = ("objective", "ratio", "surrogate", "reduction", "baseline", "scale", "KL in", "what it is", "source")
    return table(head, rows)


def metrics_table() -> str:
    rows = (
        (f"`{m.name}{'NAME' if m.name.endswith('/') else ''}`", m.unit, m.one_sentence, m.healthy) for m in METRICS.values()
    )
    return table(("metric", "unit", "what it is", "healthy"), rows)


RECIPES_HEAD = """\
A recipe is one TOML file that says everything about a run. A key that does not exist is an error, and so is a value of the
wrong type. `--set KEY=VALUE` changes any of them for one run: a stage's keys by its name (`--set grpo.group_size=16`), a
reward's by its own (`--set rewards.format.weight=0.2`). `oncurve recipe explain KEY` shows what this page shows, and
`oncurve recipe show RECIPE` prints a recipe with every default written out."""

TRL_HEAD = """\
`oncurve recipe from-trl CONFIG.yaml` turns a config of TRL 1.16's GRPOTrainer into a recipe, and notes what differs. Reward
functions need no change: a function that takes `completions` is called with the arguments that TRL gives it.
`examples/with_trl.py` runs one reward function and one data set in both."""


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
