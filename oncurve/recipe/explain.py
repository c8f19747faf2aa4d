"""`oncurve recipe explain [KEY]`: a list of every key, or one key in full, from the docstrings of the schema."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oncurve.errors import RecipeError, closest
from oncurve.objective_specs import BUILT_IN_OBJECTIVES
from oncurve.recipe.keys import RecipeKey, recipe_keys, section_keys
from oncurve.recipe.schema.base import Section
from oncurve.recipe.schema.stages import STAGE_CLASSES, STAGE_TYPES

Extensions = Mapping[str, type[Section]]


def explain(key: str | None = None, extensions: Extensions | None = None) -> RenderableType:
    """A list of every key, or one key or section in full. ``extensions`` are the options of task and reward types by
    `task.arithmetic` or `rewards.answer`."""
    extensions = extensions or {}
    if key is None:
        return _key_list(recipe_keys(extensions))
    kind = key.partition(".")[0]
    if kind in STAGE_TYPES and kind not in STAGE_CLASSES:
        extensions = {**extensions, kind: STAGE_TYPES[kind].section}
    if key in STAGE_TYPES:
        section = STAGE_TYPES[key].section
        return _section(key, section, list(section_keys(section, f"{key}.")))
    if key in extensions:
        return _section(key, extensions[key], list(section_keys(extensions[key], f"{set_key(key)}.")))
    types = _types_with(key, extensions)
    if types:
        return Group(*(Padding(_key(entry, extensions), (0 if i == 0 else 1, 0, 0, 0)) for i, entry in enumerate(types)))
    entry = find_key(key, extensions)
    return _stages(entry) if entry.key == "stages" else _key(entry, extensions)


def _types_with(key: str, extensions: Extensions) -> list[RecipeKey]:
    """The options of task and reward types that `--set` spells like this, such as `task.file.prompt` for `task.prompt`; none if
    the recipe itself has such a key."""
    known = recipe_keys(extensions)
    if any(entry.key == key for entry in known):
        return []
    inside = [entry for entry in known if any(entry.key.startswith(f"{name}.") for name in extensions)]
    return [entry for entry in inside if set_key(entry.key) == key]


def find_key(key: str, extensions: Extensions | None = None) -> RecipeKey:
    """The key of a name as `--set` spells it. A stage's `task` and `rewards` have the keys of the recipe's."""
    known = {entry.key: entry for entry in recipe_keys(extensions)}
    parts = key.split(".")
    if parts[0] in STAGE_CLASSES and len(parts) > 2 and parts[1] in ("task", "rewards"):
        parts = parts[1:]
    for name in (key, ".".join(parts), ".".join([parts[0], *parts[2:]]) if len(parts) > 2 else key):
        if name in known:
            return known[name]
    same_end = sorted((name for name in known if name.endswith(f".{parts[-1]}")), key=lambda name: not name.startswith("grpo."))
    similar = same_end or closest(key, known)
    fix = f"try `oncurve recipe explain {similar[0]}`" if similar else "`oncurve recipe explain` lists every key"
    raise RecipeError(key, "unknown key", because="no recipe has this key", fix=fix)


def _key_list(keys: list[RecipeKey]) -> Group:
    """Two lines per key, so that a key is never wrapped and can be copied from a narrow window or a pipe."""
    return Group(*(part for key in keys for part in (_headline(key), _indented(key.summary))))


def _indented(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 4))


def _headline(key: RecipeKey) -> Text:
    kind = "one of …" if len(key.allowed) > 4 else key.kind
    default = {"section": "", "unset": "  unset", "required": "  required"}.get(key.default, f" = {key.default}")
    return Text.assemble((key.key, "bold"), default, (f"  {kind}", "dim"))


def _section(name: str, section: type[Section], keys: list[RecipeKey]) -> Group:
    return Group(Text(name, "bold"), *(Text(text) for text in _paragraphs(section)), Text(), _key_list(keys))


def _paragraphs(section: type[Section]) -> list[str]:
    return [" ".join(text.split()) for text in inspect.cleandoc(section.__doc__ or "").split("\n\n")]


def _stages(key: RecipeKey) -> Group:
    rows = [part for name, cls in STAGE_CLASSES.items() for part in (Text(name, "bold"), _indented(_paragraphs(cls)[0]))]
    advice = Text("Each [[stages]] has a type; `oncurve recipe explain TYPE` lists its keys:")
    return Group(Text(key.key, "bold"), Text(key.doc), Text(), advice, *rows)


def _key(key: RecipeKey, extensions: Extensions) -> Group:
    facts = Table.grid(padding=(0, 2))
    facts.add_row(Text("takes", "dim"), Text(key.kind))
    facts.add_row(Text("default", "dim"), Text("see below" if key.default == "section" else key.default))
    if not key.inside:
        facts.add_row(Text("example", "dim"), Text(f"--set {set_example(key, extensions)}"))
    parts: list[RenderableType] = [Text(key.key, "bold"), Text(key.doc), Text(), facts]
    if key.name == "objective":
        parts += [Text(), _objectives()]
    for section in key.inside:
        parts += [Text(), _key_list(list(section_keys(section, f"{key.key}.")))]
    types = [name for name in extensions if name.startswith(f"{key.key.partition('.')[0]}.")]
    if types and key.name in ("task", "rewards", "type"):
        parts += [Text(), Text(f"Types; `oncurve recipe explain {types[0]}` lists the options of one:")]
        parts += [part for name in types for part in (Text(name, "bold"), _indented(_paragraphs(extensions[name])[0]))]
    return Group(*parts)


def _objectives() -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("objective", "what it is", "baseline", "scale", "KL in"):
        table.add_column(name, overflow="fold")
    for objective, spec in BUILT_IN_OBJECTIVES.items():
        table.add_row(objective, f"{spec.sentence} ({spec.paper})", spec.baseline, spec.scale, spec.kl_place)
    return table


def set_key(key: str) -> str:
    """A key below `task.TYPE` or `rewards.TYPE` as `--set` takes it: a reward has its own name, a task has none."""
    first, _, *inner = key.split(".")
    return ".".join(["rewards.NAME" if first == "rewards" else first, *inner])


def set_example(key: RecipeKey, extensions: Extensions | None = None) -> str:
    """A `--set` argument that this key takes: a choice other than the default, or the default itself."""
    name = key.key
    if any(name.startswith(f"{extension}.") for extension in extensions or {}):
        name = set_key(name)
    elif name.startswith("rewards."):
        name = name.replace("rewards.", "rewards.NAME.", 1)
    others = [choice for choice in key.allowed if f'"{choice}"' != key.default]
    if others:
        return f"{name}={others[0]}"
    if key.default not in ("required", "unset", "section"):
        value = key.default.strip('"')
        return f"'{name}={value}'" if set(value) & set(' []{}"') else f"{name}={value}"
    return f"{name}=" + ("16" if key.kind.startswith("integer") else "0.5" if key.kind.startswith("number") else "VALUE")
