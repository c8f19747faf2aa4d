// The list of charts, and the code that puts their points on one axis.
import type { RunCurves } from "../shared/api";

export interface ChartKind {
  id: string;
  title: string;
  /** Metrics to draw. A name that ends in "/" draws every metric with that prefix. */
  metrics: string[];
  /** A band around the first metric: lower and upper edge from two metrics, or the metric ± another one. */
  band?: { low: string; high: string } | { spread: string };
  /** Which held-out value to draw. The reward is drawn only for evaluations without an accuracy (no verifiable reward). */
  evals?: "accuracy" | "reward";
}

export const CHARTS: ChartKind[] = [
  { id: "reward", title: "Reward (mean ± std)", metrics: ["reward"], band: { spread: "reward_std" } },
  { id: "heldout", title: "Held-out accuracy", metrics: [], evals: "accuracy" },
  { id: "heldout_reward", title: "Held-out reward", metrics: [], evals: "reward" },
  { id: "accuracy", title: "Training accuracy", metrics: ["accuracy"] },
  { id: "aspects", title: "Reward by aspect", metrics: ["reward/"] },
  { id: "no_signal", title: "Groups without signal", metrics: ["no_signal_share"] },
  { id: "kl", title: "KL to the reference", metrics: ["kl"] },
  { id: "entropy", title: "Entropy", metrics: ["entropy"] },
  { id: "clip", title: "Clipped tokens", metrics: ["clip_low_share", "clip_high_share"] },
  { id: "lengths", title: "Completion length", metrics: ["length_mean"], band: { low: "length_min", high: "length_max" } },
  { id: "cut", title: "Truncated completions", metrics: ["cut_share"] },
  { id: "mismatch", title: "Sampler–learner mismatch", metrics: ["mismatch_kl", "mismatch_max"] },
  { id: "failures", title: "Failed rewards", metrics: ["failure_share"] },
  { id: "loss", title: "Loss", metrics: ["loss", "heldout_loss"] },
  { id: "grad", title: "Gradient norm", metrics: ["grad_norm"] },
  { id: "rate", title: "Learning rate", metrics: ["learning_rate"] },
  { id: "speed", title: "Speed", metrics: ["tokens_per_s", "sample_tokens_per_s"] },
  { id: "memory", title: "Memory", metrics: ["memory_mib"] },
  { id: "phases", title: "Time by phase", metrics: ["seconds/"] },
];

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
    const edges = kind.band ? ("spread" in kind.band ? [kind.band.spread] : [kind.band.low, kind.band.high]) : [];
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
  const found = new Map<string, Map<number, number | null>>();
  if (kind.evals) {
    const ruled = kind.evals === "accuracy";
    const measured = run.evals.filter((one) => ruled === (one.accuracy !== null));
    const points = measured.filter((one) => one.stage === stage).map((one) => [one.step, ruled ? one.accuracy : one.reward] as const);
    // A stage starts from the previous stage's model, so that stage's final accuracy is its step 0. Rewards may differ between stages, so they are not carried over.
    const before = ruled ? measured.filter((one) => one.stage !== stage && earlier(run, one.stage, stage)).at(-1) : undefined;
    if (points.length) found.set(EVAL, new Map(before ? [[0, before.accuracy], ...points] : points));
    return found;
  }
  const metrics = run.stages.find((one) => one.name === stage)?.metrics ?? {};
  const edges = kind.band ? ("spread" in kind.band ? [kind.band.spread] : [kind.band.low, kind.band.high]) : [];
  for (const [name, curve] of Object.entries(metrics)) {
    const wanted = [...kind.metrics, ...edges].some((one) => name === one || (one.endsWith("/") && name.startsWith(one)));
    if (wanted) found.set(name, new Map(curve.steps.map((step, index) => [step, curve.values[index] ?? null])));
  }
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
  const own = kind.evals ? EVAL : name.replace(/^(reward|seconds)\//, "");
  return runs > 1 ? (kind.metrics.length > 1 || name.includes("/") ? `${run} · ${own}` : run) : own;
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
