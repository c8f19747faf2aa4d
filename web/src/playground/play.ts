// The Playground's server calls: the list of models, and streamed samples.
import { gradeTokens, meanAdvantage, type GradeSettings } from "../formulas/advantages";
import { ApiError, type Aspect, type Completion, type Gradable, type Group } from "../shared/api";

export interface Model { target: string; says: string }
export interface ModelList { runs: { run: string; models: Model[]; asks: string[] }[]; there: string[] }
export interface Message { role: string; content: string }
export interface PlaygroundPrompt { id: string; text: string | null; messages: Message[] | null; columns: Record<string, unknown> }
export interface RunDefaults { prompts: PlaygroundPrompt[]; rewards: Record<string, unknown>[]; asks: string[]; grading: GradeSettings | null; sampling: { temperature: number; top_p: number; max_tokens: number } | null }
export interface ModelCard { target: string; chat: boolean; context: number; max_tokens: number }
export interface Sample { text: string; tokens: [text: string, id: number, logp: number, top: [text: string, logp: number][]][]; finish: "stop" | "length" | null }
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
export function asGroup(prompt: PlaygroundPrompt, shown: string, samples: Sample[], graded: TrialScore[] | null, settings: GradeSettings): Group {
  const batch = [samples.map((sample, index): Gradable => {
    const one = graded?.[index];
    const hasOutcome = one?.aspects.some((aspect) => aspect.value !== null && aspect.weight !== 0);
    return { reward: hasOutcome ? (one?.total ?? null) : null, failed: !one || one.failure !== null, truncated: sample.finish === "length", length: sample.tokens.length, mask: null, steps: null };
  })];
  const stepwise = graded?.some((one) => one.aspects.some((aspect) => aspect.steps && aspect.weight !== 0));
  const advantages = stepwise ? [] : gradeTokens(batch, 0, settings);
  const completions = samples.map((sample, index): Completion => {
    const one = graded?.[index];
    const tokens = advantages[index] ?? null;
    return {
      id: index, position: index, text: sample.text, stop: sample.finish === "length" ? "length" : "end", length: sample.tokens.length,
      total: one?.total ?? null, graded: graded ? tokens !== null : null, failure: one?.failure ?? null, advantage: meanAdvantage(tokens, null), aspects: one?.aspects ?? [],
      tokens: {
        ids: sample.tokens.map(([, id]) => id), pieces: sample.tokens.map(([text]) => text), mask: null, logp: sample.tokens.map(([, , value]) => value),
        advantage: tokens, ratio: null, entropy: null, clipped: null, kl: null, top: sample.tokens.map(([, , , top]) => top),
      },
    };
  });
  const off = stepwise ? "One of these rewards scores single steps by token, and the Playground scores texts." : graded ? null : "These completions have no rewards.";
  return { run: "", stage: "", step: 0, kind: "train", position: 0, prompt: { id: prompt.id, shown, columns: prompt.columns }, completions, grading: { settings, off, batch } };
}
