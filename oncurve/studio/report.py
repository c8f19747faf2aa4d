"""A run as one self-contained HTML file. No script, no external resource.

A summary comes first: results, verdicts and the main curves. Evaluations, the other curves, groups and the recipe unfold below.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from oncurve.records import STOP_REASONS, EvalReport
from oncurve.runs.checkpoints.listing import best_of_run
from oncurve.runs.database.reader import RecordedGroup, StageRow
from oncurve.runs.folder import RunFolder
from oncurve.runs.metrics import CURVES, find
from oncurve.runs.views import json_text
from oncurve.studio.curves import downsample
from oncurve.studio.open_run import open_reader
from oncurve.studio.queries import StudioQueries
from oncurve.studio.run_list import verdicts

Points = Sequence[tuple[int, float]]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 170, 52, 16, 8, 24
MAX_POINTS = 700


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About ``count`` round numbers from low to high, in steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * power for unit in (1, 2, 5, 10) if unit * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [float(f"{k * step:.12g}") for k in range(first, math.floor(high / step + 1e-9) + 1)]


def chart(name: str, points: Points) -> str:
    """One curve with its axes, as SVG. Values that are not finite are left out."""
    finite = [(step, value) for step, value in downsample(points, MAX_POINTS) if math.isfinite(value)]
    if not finite:
        return "<p class=soft>no values yet</p>"
    steps, values = [step for step, _ in finite], [value for _, value in finite]
    x0, x1 = float(steps[0]), float(max(steps[-1], steps[0] + 1))
    y0, y1 = min(values), max(values)
    if y1 - y0 < 1e-12 * max(1.0, abs(y1)):
        y0, y1 = y0 - 0.5, y1 + 0.5

    def x(step: float) -> float:
        return LEFT + (step - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}">']
    for tick in ticks(y0, y1):
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{_number(name, tick)}</text>')
    for tick in (tick for tick in ticks(x0, x1, 5) if tick.is_integer()):
        parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{tick:g}</text>')
    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in finite)
    parts.append(f'<polyline class="line" points="{line}"/>')
    parts.append(f'<circle class="dot" cx="{x(steps[-1]):.1f}" cy="{y(values[-1]):.1f}" r="2.6"/></svg>')
    return "".join(parts)


def _number(name: str, value: float) -> str:
    """The label of a value on an axis. Shares are shown as percentages."""
    metric = find(name)
    is_share = metric is not None and metric.unit == "share"
    return f"{100 * value:.4g} %" if is_share else f"{value:.4g}"


TITLES = {
    "accuracy": "Training accuracy",
    "sampled_entropy": "Entropy of what was sampled",
    "no_signal_share": "Groups without signal",
    "kl": "KL to the reference",
    "length_mean": "Completion length",
    "cut_share": "Truncated completions",
    "failure_share": "Failed rewards",
}
"""Titles that the studio's charts have too."""
LAST_STEPS = 10
"""The best and worst groups are taken from this many last steps: they show the run's end, not its start."""
SHOWN_GROUPS = 2
STYLE = """
:root{--ink:#1c1d20;--soft:#565a61;--line:#dedbd3;--paper:#fbfaf7;--card:#fff;--accent:#1f5f8b;--up:#0b6e69;--down:#ad3f0b}
@media(prefers-color-scheme:dark){:root{--ink:#e9e8e4;--soft:#b3b6bb;--line:#33373d;--paper:#141619;--card:#1c1f23;
--accent:#82bbe3;--up:#5cc9bf;--down:#f19a63}}
body{font:15px/1.55 ui-sans-serif,system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1080px;
margin:0 auto;padding:2rem 1.2rem 4rem}h1{font-size:1.7rem;margin:0}h2{font-size:1.2rem;margin:2.4rem 0 .8rem}h3{font-size:1rem;
margin:0 0 .3rem}p{margin:.2rem 0}.soft{color:var(--soft)}.small{font-size:.85rem}
.curves{display:grid;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:1rem}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:.9rem 1rem;margin-bottom:.8rem}
table{border-collapse:collapse}td,th{padding:.25rem 1.1rem .25rem 0;text-align:right;font-variant-numeric:tabular-nums}
td:first-child,th:first-child{text-align:left}th{font-weight:500;color:var(--soft)}
pre{font:13px/1.5 ui-monospace,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:.3rem 0}
.up{color:var(--up)}.down{color:var(--down)}svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font-size:11px}
.result{font-size:1.15rem;margin:.8rem 0}.verdicts{list-style:none;padding:0;margin:.8rem 0}
.verdicts li,.verdict{border-left:3px solid var(--down);padding:.2rem .7rem;margin:.3rem 0;background:var(--card)}
.verdict{border-color:var(--up)}summary{cursor:pointer;font-size:1.2rem;font-weight:600;margin:1.2rem 0 .6rem}
svg .grid{stroke:var(--line)}svg .line{stroke:var(--accent);fill:none;stroke-width:1.8}svg .dot{fill:var(--accent)}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


MAIN = ("reward", "accuracy", "sampled_entropy", "no_signal_share", "kl", "length_mean", "loss")
"""The curves of the summary: at most six, of those that the last stage logged."""


def report_html(run: RunFolder) -> str:
    """The complete file. Raises RunError if the run can't be read."""
    state = run.state()
    found = verdicts(run)
    recipe = run.recipe.read_text("utf-8", "replace") if run.recipe.is_file() else "(recipe.toml is missing)"
    with open_reader(run) as store:
        stages = store.stages()
        last = next((stage for stage in reversed(stages) if stage.done), None)
        main = _main_curves(store, last) if last is not None else []
        body = [
            f"<h1>{escape(run.name)}</h1>",
            f"<p class=soft>{state.current_status}, started {_date(state.created)} · trained for "
            f"{_duration(store.total_seconds())} · Oncurve {escape(state.oncurve)} · {_progress(stages)}</p>",
            _best(run, store.evals()),
            _verdicts(found),
            _figures(store, last, main) if last is not None else "",
            _details("All evaluations", _heldout(store.evals())),
            *(
                _details(f"All curves of {stage.name}", _curves(store, stage, main if stage is last else []))
                for stage in stages
                if stage.done
            ),
            _details("Groups", "".join(_groups(store))),
        ]
    body.append(_details("Recipe", f"<div class=card><pre>{escape(recipe)}</pre></div>"))
    return _page(run.name, body)


def _details(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>" if content else ""


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _best(run: RunFolder, evals: Sequence[EvalReport]) -> str:
    """The step that RUN@best names, and the first evaluation if it had another result."""
    best = best_of_run(run)
    if best is None:
        return "<p>No held-out evaluation of a trained step yet.</p>"
    is_accuracy = best.metric == "held-out accuracy"

    def written(value: float) -> str:
        return f"{100 * value:.1f} %" if is_accuracy else f"{value:.2f}".replace("-", "−")

    asked = start = ""
    if best.metric.startswith("held-out "):
        values = [(r, r.accuracy if is_accuracy else r.reward) for r in evals]
        measured = [(r, value) for r, value in values if value is not None]
        asked = "".join(f" of {r.asked} prompts" for r, _ in measured if (r.stage, r.step) == (best.stage, best.step))
        for first, value in measured[:1]:
            if (first.stage, first.step) != (best.stage, best.step):
                start = f", from {written(value)} at {escape(first.stage)} {first.step}"
    place = f"{escape(best.stage)} {best.step}"
    return f"<p class=result>Best {escape(best.metric)} <b>{written(best.value)}</b>{asked} at {place}{start}</p>"


def _verdicts(found: Sequence[Mapping[str, Any]]) -> str:
    if not found:
        return "<p class=verdict>No warning from the trainer, and no suspicious pattern in the rewards.</p>"
    lines = []
    for verdict in found:
        where = (
            f" <span class=soft>({escape(verdict['stage'])} {verdict['step']})</span>" if verdict["step"] is not None else ""
        )
        lines.append(f"<li>{escape(verdict['what'])} <span class=soft>{escape(verdict['advice'])}</span>{where}</li>")
    return f"<ul class=verdicts>{''.join(lines)}</ul>"


def _main_curves(store: StudioQueries, stage: StageRow) -> list[str]:
    logged = set(store.metric_names(stage.name))
    names = [name for name in MAIN if name in logged]
    if "entropy" in logged and "sampled_entropy" not in logged:  # stages that don't sample, and older runs
        names.append("entropy")
    return names[:6]


def _figures(store: StudioQueries, stage: StageRow, names: Sequence[str]) -> str:
    evals = [(report.step, report.accuracy) for report in store.evals(stage.name) if report.accuracy is not None]
    heldout = [_curve("heldout_accuracy", evals)] if len(evals) > 1 else []
    charts = [*heldout, *(_curve(name, store.metric(name, stage.name)) for name in names)]
    return f"<h2>{escape(stage.name)}</h2><div class=curves>{''.join(charts)}</div>" if charts else ""


def _page(title: str, body: Iterable[str]) -> str:
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
    )
    return head + "\n".join(body) + "\n</body></html>\n"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%-d %B %Y, %H:%M UTC")


def _progress(stages: Sequence[StageRow]) -> str:
    return ", ".join(f"{escape(s.name)} {s.done} of {s.steps} steps" for s in stages) or "no steps yet"


def _heldout(evals: Sequence[EvalReport]) -> str:
    """Held-out accuracy of each evaluation, by difficulty if the task has levels; the reward if no reward is verifiable."""
    lines = [
        f"<tr><td>{escape(r.stage)} {r.step}</td><td>{f'{r.reward:.2f}'.replace('-', '−')}</td><td>{r.asked}</td></tr>"
        for r in evals
        if r.accuracy is None and r.reward is not None
    ]
    heads = "<th>held-out reward</th><th>mean</th><th>prompts</th>"
    rewards = f"<h2>Held-out reward</h2><table><tr>{heads}</tr>{''.join(lines)}</table>" if lines else ""
    return _accuracies([report for report in evals if report.accuracy is not None]) + rewards


def _accuracies(evals: Sequence[EvalReport]) -> str:
    if not evals:
        return ""
    levels = list(dict.fromkeys(level for report in evals for level in report.by_difficulty))
    heads = "".join(f"<th>{escape(head)}</th>" for head in ("held-out accuracy", "all", *levels))
    lines = []
    for report in evals:
        shares = [report.by_difficulty.get(level) for level in levels]
        cells = [
            f"{100 * (report.accuracy or 0.0):.1f} %",
            *(f"{100 * s[0] / max(1, s[1]):.1f} %" if s else "–" for s in shares),
        ]
        columns = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f"<tr><td>{escape(report.stage)} {report.step}</td>{columns}</tr>")
    return f"<h2>Held-out accuracy</h2><table><tr>{heads}</tr>{''.join(lines)}</table>"


def _curves(store: StudioQueries, stage: StageRow, shown: Sequence[str]) -> str:
    """The curves that the summary does not show."""
    logged = set(store.metric_names(stage.name))
    aspects = sorted(name for name in logged if name.startswith("reward/"))
    names = [name for name in (*CURVES, *aspects) if name in logged and name not in shown]
    charts = [_curve(name, store.metric(name, stage.name)) for name in names]
    return f"<div class=curves>{''.join(charts)}</div>" if charts else ""


def title_of(name: str) -> str:
    """The title of a metric's chart: "no_signal_share" as "Groups without signal", "clip_share" as "Clip fraction"."""
    words = name.replace("_share", "_fraction").replace("_", " ").replace("/", ": ")
    words = (
        re.sub(r"\b(kl|cpu|mfu)\b", lambda found: found[0].upper(), words)
        .replace(" mib", " MiB")
        .replace(" per s", " per second")
    )
    return TITLES.get(name, words[:1].upper() + words[1:])


def _curve(name: str, points: Points) -> str:
    metric = find(name)
    text = f"<p class='small soft'>{escape(metric.one_sentence)} Healthy: {escape(metric.healthy)}.</p>" if metric else ""
    return f"<div class=card><h3 title='{escape(name)}'>{escape(title_of(name))}</h3>{chart(name, points)}{text}</div>"


def _groups(store: StudioQueries) -> list[str]:
    """The groups of the last steps with the highest and the lowest mean reward, in full."""
    stage = store.last_sampled()
    if stage is None:
        return []
    steps = range(max(1, stage.done - LAST_STEPS + 1), stage.done + 1)
    heads = [(step, head) for step in steps for head in store.groups(stage.name, step) if head.mean_total is not None]
    ranked = sorted(heads, key=lambda entry: -(entry[1].mean_total or 0.0))
    best = ranked[:SHOWN_GROUPS]
    worst = [entry for entry in ranked[::-1][:SHOWN_GROUPS] if entry not in best]
    parts = []
    for title, chosen in (("Best groups", best), ("Worst groups", worst)):
        if chosen:
            parts.append(f"<h2>{title} of the last {len(steps)} steps</h2>")
            parts += [_group(store.group(stage.name, step, head.position), f"{stage.name} {step}") for step, head in chosen]
    return parts


def _group(recorded: RecordedGroup, where: str) -> str:
    graded = recorded.graded
    parts = [f"<div class=card><p class='small soft'>{escape(where)} · {escape(graded.group.prompt.id)}</p>"]
    parts.append(f"<pre><b>{escape(json_text(graded.group.prompt.shown))}</b></pre>")
    for index in graded.best_first:
        scored, value = graded.scored.scored[index], graded.advantage_of(index)
        grade = "not graded" if value is None else f"{value:+.2f}".replace("-", "−")
        tone = "" if not value else " class=up" if value > 0 else " class=down"
        aspects = " · ".join(
            f"{a.name} {'failed' if a.failure else '–' if a.value is None else f'{a.value:g}'}" for a in scored.aspects
        )
        total = "no reward" if scored.total is None else f"reward {scored.total:.2f}"
        facts = f"{total} · {aspects} · {scored.completion.length} tokens · {STOP_REASONS[scored.completion.stop]}"
        parts.append(f"<p class=small><b{tone}>{grade}</b> <span class=soft>{escape(facts)}</span></p>")
        parts.append(f"<pre>{escape(json_text(scored.completion.text))}</pre>")
        if scored.failure is not None:
            parts.append(f"<p class='small down'>{escape(json_text(scored.failure))}</p>")
    return "".join(parts) + "</div>"
