// The Playground's server calls: the list of models, and streamed samples.
import { advantages } from "../formulas/advantages";
import { ApiError, type Aspect, type Baseline, type Completion, type Group, type Scale } from "../shared/api";

export interface Model { target: string; says: string }
export interface ModelList { runs: { run: string; models: Model[]; asks: string[] }[]; there: string[] }
export interface Message { role: string; content: string }
export interface PlaygroundPrompt { id: string; text: string | null; messages: Message[] | null; columns: Record<string, unknown> }
export interface GradingSettings { baseline: Baseline; scale: Scale; eps: number; mask_cut: boolean }
export interface RunDefaults { prompts: PlaygroundPrompt[]; rewards: Record<string, unknown>[]; asks: string[]; grading: GradingSettings | null; sampling: { temperature: number; top_p: number; max_tokens: number } | null }
export interface ModelCard { target: string; chat: boolean; context: number; max_tokens: number }
export interface Sample { text: string; tokens: [string, number, number][]; finish: "stop" | "length" | null }
export interface TrialScore { total: number | null; failure: string | null; solved: boolean; aspects: Aspect[] }

type StreamLine = { error: string } | ({ sample: number } & Sample);

/** Requests samples and reads the stream line by line; calls `onSample` with every new part. */
export async function streamSamples(body: unknown, signal: AbortSignal, onSample: (index: number, news: Sample) => void): Promise<void> {
  const headers = { "content-type": "application/json" };
  const response = await fetch("/api/playground/sample", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok || !response.body) {
    const answer = (await response.json().catch(() => null)) as { error?: Record<string, string> } | null;
    throw new ApiError(answer?.error?.where ?? "playground", answer?.error?.what ?? `the server answered with status ${response.status}`, answer?.error?.because ?? "the server failed without giving a reason", answer?.error?.fix ?? "try again");
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) {
      const update = JSON.parse(line) as StreamLine;
      if ("error" in update) throw new ApiError("the model", update.error, "the model's server refused the request", "change the prompt or the settings");
      onSample(update.sample, update);
    }
  }
}

/** The samples and their scores as a group for the Groups view. It belongs to no run, so labels can't be stored for it. */
export function asGroup(prompt: PlaygroundPrompt, shown: string, samples: Sample[], graded: TrialScore[] | null, settings: GradingSettings): Group {
  const totals = samples.map((_, index) => graded?.[index]?.total ?? null);
  const curve = graded ? (advantages([totals], settings.baseline, settings.scale, settings.eps)[0] ?? []) : null;
  const completions = samples.map((sample, index): Completion => {
    const one = graded?.[index];
    const advantage = curve && one && one.failure === null && !(settings.mask_cut && sample.finish === "length") ? (curve[index] ?? 0) : null;
    const logp = sample.tokens.map(([, , value]) => value);
    return {
      id: index, position: index, text: sample.text, stop: sample.finish === "length" ? "length" : "end", length: sample.tokens.length,
      total: totals[index] ?? null, graded: graded ? advantage !== null : null, failure: one?.failure ?? null, advantage, aspects: one?.aspects ?? [],
      tokens: {
        ids: sample.tokens.map(([, id]) => id), pieces: sample.tokens.map(([text]) => text), mask: null, logp,
        advantage: advantage === null ? null : logp.map(() => advantage), ratio: null, entropy: null, clipped: null, kl: null,
      },
    };
  });
  const grading = { ...settings, kl_in_reward: false, group_size: samples.length };
  return { run: "", stage: "", step: 0, kind: "train", position: 0, prompt: { id: prompt.id, shown, columns: prompt.columns }, completions, grading, batch: [totals] };
}
