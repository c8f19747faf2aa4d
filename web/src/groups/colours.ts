// What the colour of a token says: a share between −1 and 1, strong where there is something to see.
import type { Completion, Tokens } from "../shared/api";
import { number, signed } from "../shared/figures";

export type ColourBy = "none" | "advantage" | "logp" | "ratio" | "clipped" | "kl" | "entropy";

export const COLOURS: { by: ColourBy; name: string; says: string }[] = [
  { by: "advantage", name: "advantage", says: "teal: made likelier; orange: made less likely" },
  { by: "logp", name: "log-prob", says: "the stronger, the less likely the token was when it was sampled" },
  { by: "ratio", name: "ratio", says: "teal: likelier now than when it was sampled; orange: less likely" },
  { by: "clipped", name: "clipped", says: "marked where the clip took hold, so that the token had no gradient" },
  { by: "kl", name: "KL to the reference", says: "the stronger, the further the policy has moved from the reference" },
  { by: "entropy", name: "entropy", says: "the stronger, the more undecided the policy was" },
  { by: "none", name: "nothing", says: "plain text" },
];

export const has = (completions: Completion[], by: ColourBy): boolean =>
  by === "none" || completions.some((one) => one.tokens[by as keyof Tokens] !== null);

/** The largest size in the group, so that colours of one group can be compared. */
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
  // How strong a colour may be without drowning the letters is the theme's business.
  const strength = `calc(var(--strength) * ${Math.min(1, Math.abs(share)).toFixed(3)})`;
  if (by === "advantage" || by === "ratio") return `rgb(var(--${share >= 0 ? "up" : "down"}-rgb) / ${strength})`;
  return `rgb(var(--warm-rgb) / ${strength})`;
}

export function told(tokens: Tokens, t: number): string {
  const lines = [`token ${t}, id ${tokens.ids[t]}`, `log-prob ${number(tokens.logp[t])} (${((100 * Math.exp(tokens.logp[t] ?? 0))).toFixed(1)} %)`];
  if (tokens.advantage) lines.push(`advantage ${signed(tokens.advantage[t], 3)}`);
  if (tokens.ratio) lines.push(`ratio ${number(tokens.ratio[t], 4)}${tokens.clipped?.[t] ? ", clipped" : ""}`);
  if (tokens.entropy) lines.push(`entropy ${number(tokens.entropy[t])}`);
  if (tokens.kl) lines.push(`KL ${number(tokens.kl[t])}`);
  if (tokens.mask && !tokens.mask[t]) lines.push("written by the environment: not trained on");
  return lines.join("\n");
}
