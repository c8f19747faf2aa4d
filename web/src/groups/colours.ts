// Token colours: each value is scaled to −1 … 1 and drawn more strongly the larger it is.
import type { Completion, Tokens } from "../shared/api";
import { number, signed } from "../shared/figures";

export type ColourBy = "none" | "advantage" | "logp" | "ratio" | "clipped" | "kl" | "entropy";

export const COLOURS: { by: ColourBy; name: string; says: string }[] = [
  { by: "advantage", name: "advantage", says: "Teal tokens are made more likely, orange ones less likely." },
  { by: "logp", name: "log-prob", says: "The stronger the colour, the less likely the token was when it was sampled." },
  { by: "ratio", name: "ratio", says: "Teal tokens are more likely now than when they were sampled, orange ones less likely." },
  { by: "clipped", name: "clipped", says: "Marked tokens were clipped and got no gradient." },
  { by: "kl", name: "KL to the reference", says: "The stronger the colour, the further the policy has moved from the reference." },
  { by: "entropy", name: "entropy", says: "The stronger the colour, the less certain the policy was." },
  { by: "none", name: "none", says: "Plain text." },
];

export const has = (completions: Completion[], by: ColourBy): boolean =>
  by === "none" || completions.some((one) => one.tokens[by as keyof Tokens] !== null);

/** The largest absolute value in the group, so that colours can be compared across its completions. */
export function extent(completions: Completion[], by: ColourBy): number {
  let most = 0;
  for (const { tokens } of completions) for (let t = 0; t < tokens.ids.length; t++) most = Math.max(most, Math.abs(size(tokens, by, t)));
  return most || 1;
}

function size(tokens: Tokens, by: ColourBy, t: number): number {
  if (by === "none") return 0;
  if (by === "clipped") return tokens.clipped?.[t] ? 1 : 0;
  if (by === "ratio") return tokens.ratio?.[t] ? Math.log(tokens.ratio[t] ?? 1) : 0;
  return tokens[by]?.[t] ?? 0;
}

export function colour(tokens: Tokens, by: ColourBy, t: number, most: number): string {
  if (by === "none") return "transparent";
  if (tokens.mask && !tokens.mask[t]) return "transparent";
  const share = size(tokens, by, t) / most;
  // The theme sets the strongest colour that keeps the text readable.
  const strength = `calc(var(--strength) * ${Math.min(1, Math.abs(share)).toFixed(3)})`;
  if (by === "advantage" || by === "ratio") return `rgb(var(--${share >= 0 ? "up" : "down"}-rgb) / ${strength})`;
  return `rgb(var(--warm-rgb) / ${strength})`;
}

export function tooltip(tokens: Tokens, t: number): string {
  const lines = [`token ${t}, id ${tokens.ids[t]}`, `log-prob ${number(tokens.logp[t])} (${((100 * Math.exp(tokens.logp[t] ?? 0))).toFixed(1)} %)`];
  if (tokens.advantage) lines.push(`advantage ${signed(tokens.advantage[t], 3)}`);
  if (tokens.ratio) lines.push(`ratio ${number(tokens.ratio[t], 4)}${tokens.clipped?.[t] ? ", clipped" : ""}`);
  if (tokens.entropy) lines.push(`entropy ${number(tokens.entropy[t])}`);
  if (tokens.kl) lines.push(`KL ${number(tokens.kl[t])}`);
  if (tokens.mask && !tokens.mask[t]) lines.push("written by the environment: not trained on");
  return lines.join("\n");
}
