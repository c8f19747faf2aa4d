// The Playground's talk with the server: which models there are, and samples as they are drawn.
import { advantages } from "../formulas/advantages";
import { Refused, type Aspect, type Baseline, type Completion, type Group, type Scale } from "../shared/api";

export interface Model { target: string; says: string }
export interface Offered { runs: { run: string; models: Model[]; asks: string[] }[]; there: string[] }
export interface Message { role: string; content: string }
export interface Asked { id: string; text: string | null; messages: Message[] | null; columns: Record<string, unknown> }
export interface Habits { baseline: Baseline; scale: Scale; eps: number; mask_cut: boolean }
export interface Lent { prompts: Asked[]; rewards: Record<string, unknown>[]; asks: string[]; grading: Habits | null; sampling: { temperature: number; top_p: number; max_tokens: number } | null }
export interface Card { target: string; chat: boolean; context: number; max_tokens: number }
export interface Sample { text: string; tokens: [string, number, number][]; finish: "stop" | "length" | null }
export interface Graded { total: number | null; failure: string | null; solved: boolean; aspects: Aspect[] }

type Told = { error: string } | ({ sample: number } & Sample);

/** Asks and reads line by line; `heard` is called with every piece. */
export async function draw(body: unknown, signal: AbortSignal, heard: (index: number, news: Sample) => void): Promise<void> {
  const headers = { "content-type": "application/json" };
  const response = await fetch("/api/playground/sample", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok || !response.body) {
    const told = (await response.json().catch(() => null)) as { error?: Record<string, string> } | null;
    throw new Refused(told?.error?.where ?? "playground", told?.error?.what ?? `answered ${response.status}`, told?.error?.because ?? "of a fault of its own", told?.error?.fix ?? "try again");
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) {
      const told = JSON.parse(line) as Told;
      if ("error" in told) throw new Refused("the model", told.error, "its server says so", "change what is asked");
      heard(told.sample, told);
    }
  }
}

/** What was drawn and graded, as the Groups page shows a group; it is of no run, so that nothing can be kept about it. */
export function asGroup(prompt: Asked, shown: string, samples: Sample[], graded: Graded[] | null, habits: Habits): Group {
  const totals = samples.map((_, index) => graded?.[index]?.total ?? null);
  const curve = graded ? (advantages([totals], habits.baseline, habits.scale, habits.eps)[0] ?? []) : null;
  const completions = samples.map((sample, index): Completion => {
    const one = graded?.[index];
    const advantage = curve && one && one.failure === null && !(habits.mask_cut && sample.finish === "length") ? (curve[index] ?? 0) : null;
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
  const grading = { ...habits, kl_in_reward: false, group_size: samples.length };
  return { run: "", stage: "", step: 0, kind: "train", position: 0, prompt: { id: prompt.id, shown, columns: prompt.columns }, completions, grading, batch: [totals] };
}
