// The list of charts, and the code that puts their points on one axis.
import type { Axis, Curve, RunCurves, StageCurves } from "../shared/api";

export type ChartSection = "Learning" | "Health" | "Critic and pairs" | "Agents" | "Speed";
export const SECTIONS: ChartSection[] = ["Learning", "Health", "Critic and pairs", "Agents", "Speed"];

export interface ChartKind {
  id: string;
  title: string;
  section: ChartSection;
  /** Metrics to draw. A name that ends in "/" draws every metric with that prefix. */
  metrics: string[];
  /** A band around the first metric: lower and upper edge from two metrics, or the metric ± another one. */
  band?: { low: string; high: string } | { spread: string };
  /** What to draw of the evaluations. The reward is drawn only for evaluations without an accuracy (no verifiable reward). */
  evals?: "accuracy" | "reward" | "levels" | "metrics";
  /** Drawn as it is, whatever the smoothing: few measured points, or a schedule. */
  exact?: boolean;
  /** The heading of docs/troubleshooting.md that says what to do if the curve is not healthy. */
  trouble?: string;
  /** Parts of a sum: stacked areas for one run, the sum for several. */
  stacked?: boolean;
}

export const CHARTS: ChartKind[] = [
  { id: "reward", title: "Reward (mean ± std)", section: "Learning", metrics: ["reward"], band: { spread: "reward_std" }, trouble: "the-reward-is-flat" },
  { id: "heldout", title: "Held-out accuracy", section: "Learning", metrics: [], evals: "accuracy", exact: true, trouble: "held-out-results-fall" },
  { id: "heldout_reward", title: "Held-out reward", section: "Learning", metrics: [], evals: "reward", exact: true, trouble: "held-out-results-fall" },
  { id: "heldout_levels", title: "Held-out accuracy by difficulty", section: "Learning", metrics: [], evals: "levels", exact: true, trouble: "the-reward-is-flat" },
  { id: "heldout_many", title: "Held-out accuracy with several samples", section: "Learning", metrics: ["pass_at/", "maj_at/"], evals: "metrics", exact: true },
  { id: "accuracy", title: "Training accuracy", section: "Learning", metrics: ["accuracy"], trouble: "held-out-results-fall" },
  { id: "teacher", title: "Divergence from the teacher", section: "Learning", metrics: ["teacher_divergence"] },
  { id: "aspects", title: "Reward by aspect", section: "Learning", metrics: ["reward/"], trouble: "the-reward-is-hacked" },
  { id: "library", title: "With and without the library", section: "Learning", metrics: ["heldout_with", "heldout_without", "heldout_reward_with", "heldout_reward_without"], exact: true },
  { id: "loss", title: "Loss", section: "Learning", metrics: ["loss", "policy_loss", "heldout_loss"], trouble: "nan-and-skipped-updates" },
  { id: "no_signal", title: "Groups without signal", section: "Health", metrics: ["no_signal_share"], trouble: "groups-have-no-signal" },
  { id: "kl", title: "KL to the reference", section: "Health", metrics: ["kl"], trouble: "the-policy-moves-too-far" },
  { id: "entropy", title: "Entropy", section: "Health", metrics: ["sampled_entropy"], trouble: "entropy-collapses" },
  { id: "update_entropy", title: "Entropy of the updated tokens", section: "Health", metrics: ["entropy"], trouble: "entropy-collapses" },
  { id: "clip", title: "Clipped tokens", section: "Health", metrics: ["clip_low_share", "clip_high_share", "clip_share"], trouble: "the-policy-moves-too-far" },
  { id: "ratio", title: "Ratio of new to old probability", section: "Health", metrics: ["ratio_mean", "ratio_max"], trouble: "the-policy-moves-too-far" },
  { id: "update_kl", title: "KL of the step's updates", section: "Health", metrics: ["update_kl", "step_kl"], trouble: "the-policy-moves-too-far" },
  { id: "lengths", title: "Completion length", section: "Health", metrics: ["length_mean"], band: { low: "length_min", high: "length_max" }, trouble: "lengths-explode" },
  { id: "cut", title: "Truncated completions", section: "Health", metrics: ["cut_share"], trouble: "lengths-explode" },
  { id: "failures", title: "Failed rewards", section: "Health", metrics: ["failure_share"], trouble: "rewards-fail" },
  { id: "mismatch", title: "Sampler–learner mismatch", section: "Health", metrics: ["mismatch_kl", "mismatch_max"], trouble: "sampler-and-learner-disagree" },
  { id: "grad", title: "Gradient norm", section: "Health", metrics: ["grad_norm"], trouble: "nan-and-skipped-updates" },
  { id: "skipped", title: "Skipped updates", section: "Health", metrics: ["skipped_updates", "skipped_critic_updates"], trouble: "nan-and-skipped-updates" },
  { id: "rate", title: "Learning rate", section: "Health", metrics: ["learning_rate"], exact: true },
  { id: "explained", title: "Variance that the critic explains", section: "Critic and pairs", metrics: ["explained_variance"] },
  { id: "value_loss", title: "Critic loss", section: "Critic and pairs", metrics: ["value_loss"] },
  { id: "value_mean", title: "Mean value", section: "Critic and pairs", metrics: ["value_mean"] },
  { id: "value_clip", title: "Clipped values", section: "Critic and pairs", metrics: ["value_clip_share"] },
  { id: "critic_grad", title: "Critic gradient norm", section: "Critic and pairs", metrics: ["critic_grad_norm"] },
  { id: "pair_accuracy", title: "Pair accuracy", section: "Critic and pairs", metrics: ["pair_accuracy", "heldout_pair_accuracy"] },
  { id: "pair_rewards", title: "Implicit rewards of pairs", section: "Critic and pairs", metrics: ["chosen_reward", "rejected_reward"] },
  { id: "pair_margin", title: "Margin of pairs", section: "Critic and pairs", metrics: ["pair_margin"] },
  { id: "calibration", title: "Calibration error", section: "Critic and pairs", metrics: ["calibration_error"] },
  { id: "speed", title: "Tokens per second", section: "Speed", metrics: ["tokens_per_s", "sample_tokens_per_s"], trouble: "training-is-slow" },
  { id: "phases", title: "Time by phase", section: "Speed", metrics: ["seconds/"], stacked: true, trouble: "training-is-slow" },
  { id: "update_parts", title: "Update time by part", section: "Speed", metrics: ["seconds/update/"], stacked: true },
  { id: "mfu", title: "Model FLOP utilisation", section: "Speed", metrics: ["mfu"], trouble: "training-is-slow" },
  { id: "tflops", title: "Update TFLOP/s", section: "Speed", metrics: ["update_tflops"], trouble: "training-is-slow" },
  { id: "memory", title: "Memory", section: "Speed", metrics: ["memory_mib"], trouble: "out-of-memory" },
];

const MACHINE = /_seconds$|_per_(s|pass|row)$|^tokens$|^epoch$|^examples_seen$|^draft_/;
const AGENT = /^(turn|tool|agent|environment)/;
/** A family's chart draws its own members, not those of a family inside it: `seconds/` draws seconds/update, not seconds/update/pack. */
const isMember = (family: string, name: string): boolean => name.startsWith(family) && (family !== "seconds/" || !name.slice(family.length).includes("/"));
const matches = (kind: ChartKind, name: string): boolean => [...kind.metrics, ...edgeNames(kind)].some((one) => name === one || (one.endsWith("/") && isMember(one, name)));

/** The section of the page that a metric belongs to. */
export const sectionOf = (name: string): ChartSection =>
  CHARTS.find((kind) => !kind.evals && matches(kind, name))?.section ?? (MACHINE.test(name) ? "Speed" : AGENT.test(name) ? "Agents" : "Health");

/** The list above, and one chart for each recorded metric that it does not name: whatever a run records is drawn. */
export function chartsFor(runs: RunCurves[], stage: string): ChartKind[] {
  const names = new Set(runs.flatMap((run) => Object.keys(run.stages.find((one) => one.name === stage)?.metrics ?? {})));
  // Entropy means that of everything sampled. Stages that don't sample, and old runs, have only the update's.
  const charts = names.has("sampled_entropy") ? CHARTS : CHARTS.filter((kind) => kind.id !== "update_entropy").map((kind) => (kind.id === "entropy" ? { ...kind, metrics: ["entropy"] } : kind));
  const others = [...names].filter((name) => !charts.some((kind) => !kind.evals && matches(kind, name)));
  const families = [...new Set(others.map((name) => name.slice(0, name.lastIndexOf("/") + 1) || name))].sort();
  return [...charts, ...families.map((name): ChartKind => ({ id: name.replace(/\/$/, "").replaceAll("/", "_"), title: titleOf(name), section: sectionOf(name), metrics: [name] }))];
}

const UNITS: Record<string, string> = { kl: "KL", cpu: "CPU", mib: "MiB", mfu: "MFU", tflops: "TFLOP/s" };
/** "clip_share" as "clip fraction". */
function wordsOf(name: string): string {
  const words = name.replace(/\/$/, "").replace(/_share$/, "_fraction").replaceAll("_", " ").replaceAll("/", ", ");
  return words.replace(/\b(kl|cpu|mib|mfu|tflops)\b/g, (word) => UNITS[word] ?? word).replace(/ per s\b/, " per second");
}
export function titleOf(name: string): string {
  const words = wordsOf(name);
  return words.charAt(0).toUpperCase() + words.slice(1);
}

/** `steps` are the steps of a line's points: its x may be something else. `values` of a stacked line include those below it. */
export interface Line { label: string; name: string; run: string; colour: string; dash: number[]; values: (number | null)[]; own: (number | null)[]; steps: (number | null)[] }
export interface Band { run: string; colour: string; low: (number | null)[]; high: (number | null)[] }
export interface ChartData { x: number[]; axis: Axis; lines: Line[]; bands: Band[]; stacked: boolean }

const LIGHT = ["#1f5f8b", "#b4501e", "#2b7a4b", "#8a3f8f", "#9a7400", "#a1242b", "#3f6f76", "#5b5b8f"];
const DARK = ["#82bbe3", "#f0a070", "#7fcb9b", "#d79bdc", "#e3c464", "#f39a97", "#8fc6cd", "#b0b0e6"];
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3], [1, 4], [12, 4]];
export const MOST_RUNS = 20;
export const colours = (dark: boolean): string[] => (dark ? DARK : LIGHT);
/** The colours repeat after eight runs; from there on, dashes tell them apart. */
const dashOfRun = (index: number): number[] => DASHES[Math.floor(index / LIGHT.length) % DASHES.length] ?? [];

const EVAL = "held-out";

type Points = Map<number, number | null>;

/** One chart's curves for a stage of the chosen runs, on one x axis. */
export function draw(kind: ChartKind, runs: RunCurves[], stage: string, palette: string[], axis: Axis = "steps"): ChartData {
  const found = runs.map((run, index) => {
    const toX = axisOf(run.stages.find((one) => one.name === stage), axis);
    const curves = new Map([...pick(kind, run, stage)].map(([name, curve]) => [name, new Map([...curve].flatMap(([step, value]) => { const x = toX(step); return x === null ? [] : [[x, { step, value }] as const]; }))]));
    return { run: run.run, index, curves };
  });
  const x = [...new Set(found.flatMap(({ curves }) => [...curves.values()].flatMap((curve) => [...curve.keys()])))].sort((a, b) => a - b);
  const lines: Line[] = [];
  const bands: Band[] = [];
  for (const { run, index: place, curves } of found) {
    const edges = edgeNames(kind);
    const names = [...curves.keys()].filter((name) => !edges.includes(name));
    const on = (name: string): (number | null)[] => x.map((at) => curves.get(name)?.get(at)?.value ?? null);
    const steps = (name: string): (number | null)[] => x.map((at) => curves.get(name)?.get(at)?.step ?? null);
    const of = (index: number): string => palette[index % palette.length] ?? "#888";
    if (kind.stacked && names.length) {
      // From the largest at the bottom to the smallest at the top.
      const ordered = names.map((name) => ({ name, values: on(name) })).sort((a, b) => total(b.values) - total(a.values));
      const sums = new Array<number>(x.length).fill(0);
      const layers = ordered.map(({ name, values }, index) => {
        values.forEach((value, at) => (sums[at] = (sums[at] ?? 0) + (value ?? 0)));
        return { label: label(kind, name, run, 1), name, run, colour: of(index), dash: [], values: x.map((_, at) => (ordered[0]?.values[at] == null && values[at] == null ? null : (sums[at] ?? 0))), own: values, steps: steps(name) };
      });
      if (runs.length === 1) lines.push(...layers);
      else { const top = layers.at(-1); if (top) lines.push({ ...top, label: run, name: kind.id, colour: of(place), dash: dashOfRun(place), own: top.values }); }
      continue;
    }
    names.forEach((name, index) => {
      const values = on(name);
      // Within one run each metric has its colour; with several runs a colour is a run, and dashes tell metrics apart.
      const style = runs.length === 1 ? { colour: of(index), dash: dashOfRun(index) } : { colour: of(place), dash: names.length > 1 ? (DASHES[index % DASHES.length] ?? []) : dashOfRun(place) };
      lines.push({ label: label(kind, name, run, runs.length), name, run, ...style, values, own: values, steps: steps(name) });
    });
    const band = kind.band && edgesOf(kind.band, kind.metrics[0] ?? "", curves, on);
    if (band && runs.length <= 3) bands.push({ run, colour: of(place), ...band });
  }
  return { x, axis, lines, bands, stacked: Boolean(kind.stacked) && runs.length === 1 };
}

const total = (values: (number | null)[]): number => values.reduce<number>((sum, value) => sum + (value ?? 0), 0);

/** From a step to its place on an axis, interpolated where a long axis was thinned; null if the run does not have the axis. */
export function axisOf(stage: StageCurves | undefined, axis: Axis): (step: number) => number | null {
  if (axis === "steps") return (step) => step;
  const curve = stage?.axes[axis];
  if (!curve?.steps.length) return () => null;
  const known = new Map(curve.steps.map((step, index) => [step, curve.values[index] ?? null]));
  return (step) => (known.has(step) ? (known.get(step) ?? null) : between(curve, step));
}

function between(curve: Curve, step: number): number | null {
  const next = curve.steps.findIndex((one) => one >= step);
  if (step <= 0) return 0;
  if (next < 0) return curve.values.at(-1) ?? null;
  const [high, highValue] = [curve.steps[next] ?? step, curve.values[next] ?? 0];
  const [low, lowValue] = next ? [curve.steps[next - 1] ?? 0, curve.values[next - 1] ?? 0] : [0, 0];
  return high === step ? highValue : lowValue + ((highValue - lowValue) * (step - low)) / (high - low);
}

function pick(kind: ChartKind, run: RunCurves, stage: string): Map<string, Points> {
  if (kind.evals) return pickEvals(kind, run, stage);
  const found = new Map<string, Points>();
  for (const [name, curve] of Object.entries(run.stages.find((one) => one.name === stage)?.metrics ?? {})) {
    if (matches(kind, name)) found.set(name, new Map(curve.steps.map((step, index) => [step, curve.values[index] ?? null])));
  }
  return found;
}

const edgeNames = (kind: ChartKind): string[] => (kind.band ? ("spread" in kind.band ? [kind.band.spread] : [kind.band.low, kind.band.high]) : []);

function pickEvals(kind: ChartKind, run: RunCurves, stage: string): Map<string, Points> {
  const found = new Map<string, Points>();
  const add = (name: string, step: number, value: number | null): void => void found.set(name, (found.get(name) ?? new Map<number, number | null>()).set(step, value));
  if (kind.evals === "levels" || kind.evals === "metrics") {
    for (const one of run.evals.filter((report) => report.stage === stage)) {
      if (kind.evals === "levels") for (const [level, [solved, asked]] of Object.entries(one.by_difficulty ?? {})) add(`${level} (${asked})`, one.step, asked ? solved / asked : null);
      else for (const [name, value] of Object.entries(one.metrics ?? {})) if (matches(kind, name)) add(name, one.step, value);
    }
    return kind.evals === "levels" && found.size < 2 ? new Map() : found;
  }
  const ruled = kind.evals === "accuracy";
  const measured = run.evals.filter((one) => ruled === (one.accuracy !== null));
  const points = measured.filter((one) => one.stage === stage).map((one) => [one.step, ruled ? one.accuracy : one.reward] as const);
  // A stage starts from the previous stage's model, so that stage's final accuracy is its step 0. Rewards may differ between stages, so they are not carried over.
  const before = ruled ? measured.filter((one) => one.stage !== stage && earlier(run, one.stage, stage)).at(-1) : undefined;
  if (points.length) found.set(EVAL, new Map(before ? [[0, before.accuracy], ...points] : points));
  return found;
}

function earlier(run: RunCurves, one: string, other: string): boolean {
  const names = run.stages.map((stage) => stage.name);
  return names.indexOf(one) < names.indexOf(other);
}

function edgesOf(
  band: NonNullable<ChartKind["band"]>, middle: string, curves: Map<string, unknown>, on: (name: string) => (number | null)[],
): { low: (number | null)[]; high: (number | null)[] } | null {
  if (!("spread" in band)) return curves.has(band.low) && curves.has(band.high) ? { low: on(band.low), high: on(band.high) } : null;
  if (!curves.has(middle) || !curves.has(band.spread)) return null;
  const [centre, spread] = [on(middle), on(band.spread)];
  const edge = (sign: number): (number | null)[] => centre.map((value, index) => (value === null || spread[index] == null ? null : value + sign * spread[index]));
  return { low: edge(-1), high: edge(1) };
}

function label(kind: ChartKind, name: string, run: string, runs: number): string {
  const own = kind.evals === "levels" ? name : wordsOf(name.replace(/^(reward|seconds\/update|seconds)\//, "").replace(/^(pass|maj)_at\//, "$1@"));
  return runs > 1 ? (kind.metrics.length > 1 || name.includes("/") || kind.evals === "levels" ? `${run} · ${own}` : run) : own;
}

/** Exponential smoothing, corrected for its start: s_t = Σ_k w^(t−k) x_k / Σ_k w^(t−k). Gaps stay gaps. */
export function smooth(values: (number | null)[], weight: number): (number | null)[] {
  if (weight <= 0) return values;
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + value;
    norm = weight * norm + 1;
    return sum / norm;
  });
}

/** The Wilson 95 % interval of a share: `solved` of `asked`. */
export function interval(share: number, asked: number): [number, number] {
  if (!asked) return [0, 1];
  const z = 1.959964;
  const centre = (share + (z * z) / (2 * asked)) / (1 + (z * z) / asked);
  const half = (z * Math.sqrt((share * (1 - share)) / asked + (z * z) / (4 * asked * asked))) / (1 + (z * z) / asked);
  return [Math.max(0, centre - half), Math.min(1, centre + half)];
}
