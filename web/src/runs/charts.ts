// The list of charts, and the code that puts their points on one axis.
import type { RunCurves } from "../shared/api";

export type ChartSection = "Learning" | "Health" | "Critic and pairs" | "Speed";
export const SECTIONS: ChartSection[] = ["Learning", "Health", "Critic and pairs", "Speed"];

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
}

export const CHARTS: ChartKind[] = [
  { id: "reward", title: "Reward (mean ± std)", section: "Learning", metrics: ["reward"], band: { spread: "reward_std" } },
  { id: "heldout", title: "Held-out accuracy", section: "Learning", metrics: [], evals: "accuracy", exact: true },
  { id: "heldout_reward", title: "Held-out reward", section: "Learning", metrics: [], evals: "reward", exact: true },
  { id: "heldout_levels", title: "Held-out accuracy by difficulty", section: "Learning", metrics: [], evals: "levels", exact: true },
  { id: "heldout_many", title: "Held-out accuracy with several samples", section: "Learning", metrics: ["pass_at/", "maj_at/"], evals: "metrics", exact: true },
  { id: "accuracy", title: "Training accuracy", section: "Learning", metrics: ["accuracy"] },
  { id: "aspects", title: "Reward by aspect", section: "Learning", metrics: ["reward/"] },
  { id: "library", title: "With and without the library", section: "Learning", metrics: ["heldout_with", "heldout_without", "heldout_reward_with", "heldout_reward_without"], exact: true },
  { id: "loss", title: "Loss", section: "Learning", metrics: ["loss", "policy_loss", "heldout_loss"] },
  { id: "no_signal", title: "Groups without signal", section: "Health", metrics: ["no_signal_share"] },
  { id: "kl", title: "KL to the reference", section: "Health", metrics: ["kl"] },
  { id: "entropy", title: "Entropy", section: "Health", metrics: ["entropy"] },
  { id: "clip", title: "Clipped tokens", section: "Health", metrics: ["clip_low_share", "clip_high_share"] },
  { id: "ratio", title: "Ratio of new to old probability", section: "Health", metrics: ["ratio_mean", "ratio_max"] },
  { id: "update_kl", title: "KL of the step's updates", section: "Health", metrics: ["update_kl", "step_kl"] },
  { id: "lengths", title: "Completion length", section: "Health", metrics: ["length_mean"], band: { low: "length_min", high: "length_max" } },
  { id: "cut", title: "Truncated completions", section: "Health", metrics: ["cut_share"] },
  { id: "failures", title: "Failed rewards", section: "Health", metrics: ["failure_share"] },
  { id: "mismatch", title: "Sampler–learner mismatch", section: "Health", metrics: ["mismatch_kl", "mismatch_max"] },
  { id: "grad", title: "Gradient norm", section: "Health", metrics: ["grad_norm"] },
  { id: "skipped", title: "Skipped updates", section: "Health", metrics: ["skipped_updates", "skipped_critic_updates"] },
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
  { id: "speed", title: "Tokens per second", section: "Speed", metrics: ["tokens_per_s", "sample_tokens_per_s"] },
  { id: "mfu", title: "Model FLOP utilisation", section: "Speed", metrics: ["mfu"] },
  { id: "tflops", title: "Update TFLOP/s", section: "Speed", metrics: ["update_tflops"] },
  { id: "memory", title: "Memory (MiB)", section: "Speed", metrics: ["memory_mib"] },
  { id: "phases", title: "Time by phase (s)", section: "Speed", metrics: ["seconds/"] },
];

const MACHINE = /_seconds$|_per_s$|^tokens$|^epoch$|^examples_seen$/;
const matches = (kind: ChartKind, name: string): boolean => [...kind.metrics, ...edgeNames(kind)].some((one) => name === one || (one.endsWith("/") && name.startsWith(one)));

/** The list above, and one chart for each recorded metric that it does not name: whatever a run records is drawn. */
export function chartsFor(runs: RunCurves[], stage: string): ChartKind[] {
  const names = new Set(runs.flatMap((run) => Object.keys(run.stages.find((one) => one.name === stage)?.metrics ?? {})));
  const others = [...names].filter((name) => !CHARTS.some((kind) => !kind.evals && matches(kind, name)));
  const families = [...new Set(others.map((name) => (name.includes("/") ? name.slice(0, name.indexOf("/") + 1) : name)))].sort();
  return [...CHARTS, ...families.map((name): ChartKind => ({ id: name.replace("/", ""), title: titleOf(name), section: MACHINE.test(name) ? "Speed" : "Health", metrics: [name] }))];
}

/** "clip_share" as "Clip fraction". */
export function titleOf(name: string): string {
  const words = name.replace(/\/$/, "").replace(/_share$/, "_fraction").replaceAll("_", " ");
  return words.charAt(0).toUpperCase() + words.slice(1);
}

export interface Line { label: string; run: string; colour: string; dash: number[]; values: (number | null)[] }
export interface Band { run: string; colour: string; low: (number | null)[]; high: (number | null)[] }
export interface ChartData { steps: number[]; lines: Line[]; bands: Band[] }

const LIGHT = ["#1f5f8b", "#b4501e", "#2b7a4b", "#8a3f8f", "#9a7400", "#a1242b", "#3f6f76", "#5b5b8f"];
const DARK = ["#82bbe3", "#f0a070", "#7fcb9b", "#d79bdc", "#e3c464", "#f39a97", "#8fc6cd", "#b0b0e6"];
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3], [1, 4], [12, 4]];
export const MOST_RUNS = LIGHT.length;
export const colours = (dark: boolean): string[] => (dark ? DARK : LIGHT);

const EVAL = "held-out";

/** One chart's curves for a stage of the chosen runs, on one step axis. */
export function draw(kind: ChartKind, runs: RunCurves[], stage: string, palette: string[]): ChartData {
  const found = runs.map((run, index) => ({ run: run.run, colour: palette[index % palette.length] ?? "#888", curves: pick(kind, run, stage) }));
  const steps = [...new Set(found.flatMap(({ curves }) => [...curves.values()].flatMap((curve) => [...curve.keys()])))].sort((a, b) => a - b);
  const on = (curve: Map<number, number | null> | undefined): (number | null)[] => steps.map((step) => curve?.get(step) ?? null);
  const lines: Line[] = [];
  const bands: Band[] = [];
  for (const { run, colour, curves } of found) {
    const edges = edgeNames(kind);
    const names = [...curves.keys()].filter((name) => !edges.includes(name));
    names.forEach((name, index) => {
      lines.push({ label: label(kind, name, run, runs.length), run, colour, dash: DASHES[index % DASHES.length] ?? [], values: on(curves.get(name)) });
    });
    const band = kind.band && edgesOf(kind.band, kind.metrics[0] ?? "", curves, on);
    if (band && runs.length <= 3) bands.push({ run, colour, ...band });
  }
  return { steps, lines, bands };
}

function pick(kind: ChartKind, run: RunCurves, stage: string): Map<string, Map<number, number | null>> {
  if (kind.evals) return pickEvals(kind, run, stage);
  const found = new Map<string, Map<number, number | null>>();
  for (const [name, curve] of Object.entries(run.stages.find((one) => one.name === stage)?.metrics ?? {})) {
    if (matches(kind, name)) found.set(name, new Map(curve.steps.map((step, index) => [step, curve.values[index] ?? null])));
  }
  return found;
}

const edgeNames = (kind: ChartKind): string[] => (kind.band ? ("spread" in kind.band ? [kind.band.spread] : [kind.band.low, kind.band.high]) : []);

function pickEvals(kind: ChartKind, run: RunCurves, stage: string): Map<string, Map<number, number | null>> {
  const found = new Map<string, Map<number, number | null>>();
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
  band: NonNullable<ChartKind["band"]>, middle: string, curves: Map<string, Map<number, number | null>>, on: (curve: Map<number, number | null> | undefined) => (number | null)[],
): { low: (number | null)[]; high: (number | null)[] } | null {
  if (!("spread" in band)) return curves.has(band.low) && curves.has(band.high) ? { low: on(curves.get(band.low)), high: on(curves.get(band.high)) } : null;
  if (!curves.has(middle) || !curves.has(band.spread)) return null;
  const [centre, spread] = [on(curves.get(middle)), on(curves.get(band.spread))];
  const edge = (sign: number): (number | null)[] => centre.map((value, index) => (value === null || spread[index] == null ? null : value + sign * spread[index]));
  return { low: edge(-1), high: edge(1) };
}

function label(kind: ChartKind, name: string, run: string, runs: number): string {
  const own = name.replace(/^(reward|seconds)\//, "").replace(/^(pass|maj)_at\//, "$1@");
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
