"""`oncurve recipe explain [KEY]`: the schema's own docstrings, as a list of every key or one key in full."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oncurve.errors import RecipeError
from oncurve.objective_specs import OBJECTIVE_SPECS
from oncurve.recipe.error_messages import closest_name
from oncurve.recipe.keys import STAGES, Entry, entries_of, tree
from oncurve.recipe.schema.base import Section

Extensions = Mapping[str, type[Section]]


def explain(key: str | None = None, extensions: Extensions | None = None) -> RenderableType:
    """Every key in a list, or one key, section or objective in full. ``extensions`` are the options of task and reward types,
    as `task.arithmetic` or `rewards.answer`."""
    extensions = extensions or {}
    if key is None:
        return _list(tree(extensions))
    if key in STAGES:
        return _section(key, STAGES[key], list(entries_of(STAGES[key], f"{key}.")))
    if key in extensions:
        return _section(key, extensions[key], list(entries_of(extensions[key], f"{as_set(key)}.")))
    entry = find_entry(key, extensions)
    return _stages(entry) if entry.key == "stages" else _entry(entry, extensions)


def find_entry(key: str, extensions: Extensions | None = None) -> Entry:
    """The entry of a key, written as in `--set`. A stage's own task and rewards have the keys of the recipe's."""
    known = {entry.key: entry for entry in tree(extensions)}
    parts = key.split(".")
    if parts[0] in STAGES and len(parts) > 2 and parts[1] in ("task", "rewards"):
        parts = parts[1:]
    for name in (key, ".".join(parts), ".".join([parts[0], *parts[2:]])):
        if name in known:
            return known[name]
    close = closest_name(key, known) or next((name for name in known if name.endswith(f".{parts[-1]}")), None)
    fix = f"try `oncurve recipe explain {close}`" if close else "`oncurve recipe explain` lists every key"
    raise RecipeError(key, "unknown key", because="no recipe has such a key", fix=fix)


def _list(entries: list[Entry]) -> Group:
    """Two lines for each key, so that a key stays whole, to be found and copied, in a narrow window and in a pipe."""
    return Group(*(part for entry in entries for part in (_head(entry), _under(entry.summary))))


def _under(words: str) -> Padding:
    return Padding(Text(words), (0, 0, 0, 4))


def _head(entry: Entry) -> Text:
    kind = "one of …" if len(entry.allowed) > 4 else entry.kind
    default = {"section": "", "unset": "  unset", "required": "  required"}.get(entry.default, f" = {entry.default}")
    return Text.assemble((entry.key, "bold"), default, (f"  {kind}", "dim"))


def _section(key: str, section: type[Section], entries: list[Entry]) -> Group:
    return Group(Text(key, "bold"), *(Text(words) for words in _paragraphs(section)), Text(), _list(entries))


def _paragraphs(section: type[Section]) -> list[str]:
    return [" ".join(words.split()) for words in inspect.cleandoc(section.__doc__ or "").split("\n\n")]


def _stages(entry: Entry) -> Group:
    rows = [part for name, cls in STAGES.items() for part in (Text(name, "bold"), _under(_paragraphs(cls)[0]))]
    advice = Text("Each [[stages]] has a type; `oncurve recipe explain TYPE` lists its keys:")
    return Group(Text(entry.key, "bold"), Text(entry.doc), Text(), advice, *rows)


def _entry(entry: Entry, extensions: Extensions) -> Group:
    facts = Table.grid(padding=(0, 2))
    facts.add_row(Text("takes", "dim"), Text(entry.kind))
    facts.add_row(Text("default", "dim"), Text("see below" if entry.default == "section" else entry.default))
    if not entry.inside:
        facts.add_row(Text("example", "dim"), Text(f"--set {example(entry, extensions)}"))
    parts: list[RenderableType] = [Text(entry.key, "bold"), Text(entry.doc), Text(), facts]
    if entry.name == "objective":
        parts += [Text(), _objectives()]
    for section in entry.inside:
        parts += [Text(), _list(list(entries_of(section, f"{entry.key}.")))]
    options = [name for name in extensions if name.startswith(f"{entry.key.partition('.')[0]}.")]
    if options and entry.name in ("task", "rewards", "type"):
        parts += [Text(), Text(f"Types, each with options of its own: {', '.join(options)}")]
    return Group(*parts)


def _objectives() -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("objective", "what it is", "baseline", "scale", "KL in"):
        table.add_column(name, overflow="fold")
    for name, spec in OBJECTIVE_SPECS.items():
        table.add_row(name, f"{spec.sentence} ({spec.paper})", spec.baseline, spec.scale, spec.kl_place)
    return table


def as_set(key: str) -> str:
    """A key below `task.TYPE` or `rewards.TYPE` as `--set` takes it, where a task has no name and a reward its own."""
    first, _, *inner = key.split(".")
    return ".".join(["rewards.NAME" if first == "rewards" else first, *inner])


def example(entry: Entry, extensions: Extensions | None = None) -> str:
    """A `--set` line that this key takes: another choice than the default, or the default itself."""
    key = entry.key
    if any(key.startswith(f"{name}.") for name in extensions or {}):
        key = as_set(key)
    elif key.startswith("rewards."):
        key = key.replace("rewards.", "rewards.NAME.", 1)
    others = [choice for choice in entry.allowed if f'"{choice}"' != entry.default]
    if others:
        return f"{key}={others[0]}"
    if entry.default not in ("required", "unset", "section"):
        value = entry.default.strip('"')
        return f"'{key}={value}'" if set(value) & set(' []{}"') else f"{key}={value}"
    kind = entry.kind
    return f"{key}=" + ("16" if kind.startswith("whole") else "0.5" if kind.startswith("number") else "VALUE")
