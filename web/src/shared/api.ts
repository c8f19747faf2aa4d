// The studio server's JSON types, and functions that call it. Every request goes to the server that sent this page.

export interface StageState { name: string; type: string; steps: number; done: number; finished: boolean }
export interface EvalPoint { stage: string; step: number; accuracy: number | null; reward: number | null; asked: number; by_difficulty?: Record<string, [number, number]>; metrics?: Record<string, number | null> }
/** The best step of a run: "held-out accuracy", "held-out reward", or the metric that the recipe keeps the best of. */
export interface Best { stage: string; step: number; metric: string; value: number | null }
export interface RunState {
  name: string;
  status: "running" | "finished" | "interrupted" | "failed" | "broken";
  reason: string | null;
  created: number | null;
  parent: { run: string; stage: string; step: number; changes: Record<string, unknown> } | null;
  stages: StageState[];
  eta: number | null;
  accuracy: number | null;
  heldout_reward: number | null;
  evals: EvalPoint[];
  /** The step that RUN@best names. */
  best: Best | null;
  /** The newest checkpoint; null if there is none yet. */
  checkpoint: { stage: string; step: number } | null;
  metrics: Record<string, number | null>;
  completions: number;
  failures: number;
  /** The time of all recorded steps. */
  seconds: number | null;
  notes: RunNotes;
}
export interface RunNotes { tags: string[]; note: string }
export interface Verdict { source: "trainer" | "audit"; kind: string; what: string; advice: string; stage: string | null; step: number | null; group: number | null }
/** Each run's recipe as dotted keys. */
export type RunSettings = Record<string, Record<string, unknown>>;
export type Axis = "steps" | "samples" | "tokens" | "seconds";
export interface Curve { steps: number[]; values: (number | null)[] }
export interface StageCurves { name: string; type: string; done: number; steps: number; metrics: Record<string, Curve>; /** Completions, tokens and seconds since the stage began, at the end of a step. */ axes: Partial<Record<Axis, Curve>> }
export interface RunCurves { run: string; stages: StageCurves[]; evals: EvalPoint[] }
export interface MetricText { unit: string; says: string; healthy: string }
export interface About { version: string; runs_dir: string; metrics: Record<string, MetricText> }

export interface Aspect { name: string; value: number | null; weight: number; failure: string | null; reason: string | null; steps?: [number, number][] | null }
export interface Tokens {
  ids: number[];
  pieces: string[] | null;
  mask: boolean[] | null;
  logp: (number | null)[];
  advantage: (number | null)[] | null;
  ratio: (number | null)[] | null;
  entropy: (number | null)[] | null;
  clipped: boolean[] | null;
  kl: (number | null)[] | null;
  /** The likeliest tokens at each place, with their log-probs. Only Playground samples have them: a run does not record them. */
  top?: [text: string, logp: number][][];
}
export interface ToolCall { name: string; arguments: string; result: string; failure: string | null; seconds: number | null }
/** A turn of an agent: the tokens [start, end) that the policy wrote, and what the environment answered. */
export interface EpisodeTurn { start: number; end: number; calls: ToolCall[]; reply: string | null; reward: number | null; failure: string | null }
export interface Episode { turns: EpisodeTurn[]; reward: number | null; failure: string | null }
export interface Completion {
  id: number; position: number; text: string; stop: "end" | "stop_string" | "length"; length: number; total: number | null;
  graded: boolean | null; failure: string | null; advantage: number | null; aspects: Aspect[]; tokens: Tokens;
  /** Missing for a Playground sample. */
  episode?: Episode | null;
}
export type Baseline = "mean" | "leave_one_out" | "none";
export type Scale = "group" | "batch" | "whiten" | "none";
/** What the advantage formulas read of a completion. `reward` is null without an outcome reward, `steps` (last token, weighted reward) without step rewards. */
export interface Gradable { reward: number | null; failed: boolean; truncated: boolean; length: number; mask: boolean[] | null; steps: [number, number][] | null }
export interface Grading { settings: { baseline: Baseline; scale: Scale; eps: number; mask_cut: boolean } | null; off: string | null; batch: Gradable[][] }
export type Kind = "train" | "eval";
export interface Group {
  run: string; stage: string; step: number; kind: Kind; position: number;
  prompt: { id: string; shown: string; columns: Record<string, unknown> };
  completions: Completion[];
  /** Given for a Playground group; for a run's group it is requested when What-if opens. */
  grading?: Grading;
}
export interface GroupHead {
  position: number; prompt_id: string; prompt: string; signal: boolean | null; completions: number; failures: number;
  mean: number | null; lowest: number | null; highest: number | null;
}
export interface Step { stage: string; step: number; kind: Kind; metrics: Record<string, number | null>; groups: GroupHead[]; totals: (number | null)[][] }
export interface Line {
  id: number; stage: string; step: number; kind: Kind; group: number; place: number; length: number; stop: string;
  prompt: string; prompt_id: string; text: string; total: number | null; advantage: number | null; failure: string | null; kl?: number;
}
export interface Searchable { aspects: string[]; accuracy: string | null; kl: boolean; tools: string[]; tool_failures: string[] }
export interface Page { completions: Line[]; before: number | null; seen: number; of: number }
export interface PromptUse { stage: string; step: number; kind: Kind; group: number; completions: number; solved: number | null; signal: boolean | null; mean: number | null; lowest: number | null; highest: number | null; length: number | null }
export type Label =
  | { type: "ranking"; stage: string; step: number; kind: Kind; group: number; rater: string; tiers: number[][] }
  | { type: "dispute"; stage: string; step: number; kind: Kind; group: number; rater: string; completion: number; reward: number | null; note: string };
export interface Feedback { labels: Label[]; pairs: number; agree: number; disagree: number; undecided: number; raters: { raters: number; pairs: number; agreed: number; kappa: number | null } }
export interface RewardStats {
  name: string; weight: number; asked: number; mean: number | null; lowest: number | null; highest: number | null; failures: number;
  /** How many values lie in each of equal parts from the lowest to the highest; empty if all are equal. */
  bins: number[];
  reasons: { said: string; failed: boolean; /** The mean score. */ value: number | null; times: number; example: Line | null }[];
}
export interface RunRewards { rewards: Record<string, unknown>[]; asks: string[]; said: RewardStats[]; of: number; max_new_tokens: number | null }
export interface Audit { stage: string | null; steps: number; signals: { name: string; what: string; examples: { step: number; group: number; total: number | null; prompt: string; text: string }[] }[] }
export interface TrialResult { completions: { total: number | null; failure: string | null; solved: boolean; aspects: Aspect[] }[] }

/** An error from the server: where it happened, what failed, why, and how to fix it. */
export class ApiError extends Error {
  constructor(readonly where: string, readonly what: string, readonly because: string, readonly fix: string) {
    super(`${where}: ${what}`);
  }
}

/** Whether only Learn is published, as a static site without a server. */
export const learnOnly = document.querySelector('meta[name="learn-only"]') !== null;

type Values = Record<string, string | number | boolean | null | undefined | string[]>;

export function address(path: string, values: Values = {}): string {
  const asked = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) {
    if (Array.isArray(value)) for (const one of value) asked.append(key, one);
    else if (value !== null && value !== undefined && value !== "" && value !== false) asked.set(key, String(value));
  }
  const query = asked.toString();
  return `/api/${path}${query ? `?${query}` : ""}`;
}

async function readJson<T>(response: Response): Promise<T> {
  if (response.ok) return (await response.json()) as T;
  const body = (await response.json().catch(() => null)) as { error?: Record<string, string> } | null;
  const error = body?.error;
  throw new ApiError(error?.where ?? "studio", error?.what ?? `the server answered with status ${response.status}`, error?.because ?? "the server failed without giving a reason", error?.fix ?? "reload the page");
}

export async function get<T>(path: string, values: Values = {}, signal?: AbortSignal): Promise<T> {
  return readJson<T>(await fetch(address(path, values), signal ? { signal } : {}));
}

export async function post<T>(path: string, body: unknown, values: Values = {}, options: RequestInit = {}): Promise<T> {
  const headers = { "content-type": "application/json" };
  return readJson<T>(await fetch(address(path, values), { method: "POST", headers, body: JSON.stringify(body), ...options }));
}

/** How a command names a run: by its folder, unless that is in ./runs. */
export const runArgument = (runsDir: string, run: string): string => (runsDir === "" || runsDir === "runs" ? run : `${runsDir}/${run}`);

export const runPath = (run: string, what: string): string => `runs/${encodeURIComponent(run)}/${what}`;
