// The planner's result, as in `oncurve plan --json`: bytes and seconds.

export interface Phase { name: string; total: number; parts: Record<string, number> }
export interface Fix { words: string; sets: Record<string, unknown>; tier: number; peak: number; host: number; step: number }
export interface PlanResult {
  algorithm: string; lora_rank: number | null; title: string; parameters: { held: number; trained: number };
  memory: { phases: Phase[]; peak: { phase: string; total: number; parts: Record<string, number> }; host: number; limit: number; note: string; fits: boolean };
  time: { phases: Record<string, number>; step: number; samples_per_day: number };
  verdict: string; fixes: Fix[]; fits_on: string[];
}
export interface ScalingRow { what: string; value: string; asked: boolean; fits: boolean; peak: number; step_seconds: number; samples_per_day: number }
export interface Report {
  asked: { model: { name: string; parameters: number }; gpu: { name: string; memory: number }; gpus: number; prompts: number; group_size: number; prompt_tokens: number; new_tokens: number; algorithm: string; lora_rank: number | null; beta: number; dtype: string };
  parts: string[]; plan: PlanResult; side_by_side: PlanResult[]; growth: ScalingRow[];
}
export interface PlanOptions { models: { name: string; parameters: number }[]; gpus: { name: string; memory: number }[]; algorithms: string[]; lora_rank: number }

export const GIB = 2 ** 30;
export const gib = (bytes: number): string => {
  const size = bytes / GIB;
  return size >= 100 ? Math.round(size).toLocaleString("en-GB") : size >= 0.095 ? size.toFixed(1) : size.toFixed(2);
};
export const seconds = (value: number): string =>
  value < 1 ? `${value.toFixed(2)} s` : value < 60 ? `${value.toFixed(1)} s` : value < 3600 ? `${(value / 60).toFixed(1)} min` : `${(value / 3600).toFixed(1)} h`;

/** One colour per part or phase, the same in every chart: cool colours for the policy, warm ones for the other models. */
const COLOURS: Record<string, string> = {
  weights: "#2f6f9f", adapter: "#5aa0cc", "master weights": "#4f86ad", moments: "#7fabc9", gradients: "#a3c4da", activations: "#2b8f86", "lm head": "#63b5ad",
  "kv pool": "#7f9a3c", "kv cache": "#7f9a3c", sampling: "#a9bd6c", reference: "#b58a2e", teacher: "#8c6bb1", "reward model": "#cf6f9a", critic: "#c9602c", "cuda context": "#8b8f96",
  sample: "#7f9a3c", score: "#cf6f9a", update: "#2b8f86", "critic update": "#c9602c", values: "#dd9165", optimiser: "#7fabc9", "between GPUs": "#5f7fb8", rest: "#b9bcc2",
};
export const colourOf = (name: string): string => COLOURS[name] ?? "#8b8f96";
