// The studio server's JSON types, and functions that call it. Every request goes to the server that sent this page.

export interface StageState { name: string; type: string; steps: number; done: number; finished: boolean }
export interface EvalPoint { stage: string; step: number; accuracy: number | null; reward: number | null; asked: number; by_difficulty?: Record<string, [number, number]>; metrics?: Record<string, number | null> }
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
  metrics: Record<string, number | null>;
  completions: number;
  failures: number;
}
export interface Curve { steps: number[]; values: (number | null)[] }
export interface StageCurves { name: string; type: string; done: number; steps: number; metrics: Record<string, Curve> }
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
}
export interface Completion {
  id: number; position: number; text: string; stop: "end" | "stop_string" | "length"; length: number; total: number | null;
  graded: boolean | null; failure: string | null; advantage: number | null; aspects: Aspect[]; tokens: Tokens;
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
export interface Searchable { aspects: string[]; accuracy: string | null; kl: boolean }
export interface Page { completions: Line[]; before: number | null; seen: number; of: number }
export interface PromptUse { stage: string; step: number; kind: Kind; group: number; completions: number; signal: boolean | null; mean: number | null; lowest: number | null; highest: number | null; length: number | null }
export type Label =
  | { type: "ranking"; stage: string; step: number; kind: Kind; group: number; tiers: number[][] }
  | { type: "dispute"; stage: string; step: number; kind: Kind; group: number; completion: number; reward: number | null; note: string };
export interface Feedback { labels: Label[]; pairs: number; agree: number; disagree: number; undecided: number }
export interface RewardStats {
  name: string; weight: number; asked: number; mean: number | null; lowest: number | null; highest: number | null; failures: number;
  reasons: { said: string; failed: boolean; times: number; example: Line | null }[];
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
  const body: unknown = await response.json().catch(() => null);
  if (response.ok) return body as T;
  const error = (body as { error?: Record<string, string> } | null)?.error;
  throw new ApiError(error?.where ?? "studio", error?.what ?? `the server answered with status ${response.status}`, error?.because ?? "the server failed without giving a reason", error?.fix ?? "reload the page");
}

export async function get<T>(path: string, values: Values = {}, signal?: AbortSignal): Promise<T> {
  return readJson<T>(await fetch(address(path, values), signal ? { signal } : {}));
}

export async function post<T>(path: string, body: unknown, values: Values = {}): Promise<T> {
  const headers = { "content-type": "application/json" };
  return readJson<T>(await fetch(address(path, values), { method: "POST", headers, body: JSON.stringify(body) }));
}

export const runPath = (run: string, what: string): string => `runs/${encodeURIComponent(run)}/${what}`;
