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

/** The largest absolute value of the group's own tokens, so that colours can be compared across its completions. */
export function extent(completions: Completion[], by: ColourBy): number {
  let most = 0;
  for (const { tokens } of completions) for (let t = 0; t < tokens.ids.length; t++) if (isOwn(tokens, t)) most = Math.max(most, Math.abs(size(tokens, by, t)));
  return most || 1;
}

/** Whether the policy wrote a token; the environment's are not coloured. */
const isOwn = (tokens: Tokens, t: number): boolean => !tokens.mask || tokens.mask[t] === true;

function size(tokens: Tokens, by: ColourBy, t: number): number {
  if (by === "none") return 0;
  if (by === "clipped") return tokens.clipped?.[t] ? 1 : 0;
  if (by === "ratio") return tokens.ratio?.[t] ? Math.log(tokens.ratio[t] ?? 1) : 0;
  return tokens[by]?.[t] ?? 0;
}

export function colour(tokens: Tokens, by: ColourBy, t: number, most: number): string {
  if (by === "none" || !isOwn(tokens, t)) return "transparent";
  const share = size(tokens, by, t) / most;
  // The theme sets the strongest colour that keeps the text readable.
  const strength = `calc(var(--strength) * ${Math.min(1, Math.abs(share)).toFixed(3)})`;
  if (by === "advantage" || by === "ratio") return `rgb(var(--${share >= 0 ? "up" : "down"}-rgb) / ${strength})`;
  return `rgb(var(--warm-rgb) / ${strength})`;
}

/** What is recorded of a token, with names and units for people. */
export function facts(tokens: Tokens, t: number): [string, string][] {
  const found: [string, string][] = [["token", `${t} of ${tokens.ids.length}, id ${tokens.ids[t]}`], ["probability", `${(100 * Math.exp(tokens.logp[t] ?? 0)).toFixed(1)} %`], ["log-prob", number(tokens.logp[t])]];
  if (tokens.advantage) found.push(["advantage", signed(tokens.advantage[t], 3)]);
  if (tokens.ratio) found.push(["ratio", `${number(tokens.ratio[t], 4)}${tokens.clipped?.[t] ? ", clipped" : ""}`]);
  if (tokens.entropy) found.push(["entropy", `${number(tokens.entropy[t])} nats`]);
  if (tokens.kl && isOwn(tokens, t)) found.push(["KL", `${number(tokens.kl[t])} nats`]);
  if (!isOwn(tokens, t)) found.push(["written by", "the environment: not trained on"]);
  return found;
}

export const tooltip = (tokens: Tokens, t: number): string => facts(tokens, t).map(([name, value]) => `${name} ${value}`).join("\n");

/** The ends of the colour scale in the unit that is coloured: [left, right] with their colours, or null if there is no scale. */
export function legend(by: ColourBy, most: number): { label: string; colour: string }[] | null {
  const strong = (name: string): string => `rgb(var(--${name}-rgb) / var(--strength))`;
  const middle = { label: by === "ratio" ? "1" : "0", colour: "transparent" };
  if (by === "advantage") return [{ label: signed(-most), colour: strong("down") }, middle, { label: signed(most), colour: strong("up") }];
  if (by === "ratio") return [{ label: number(Math.exp(-most)), colour: strong("down") }, middle, { label: number(Math.exp(most)), colour: strong("up") }];
  if (by === "logp") return [{ label: "probability 100 %", colour: "transparent" }, { label: `${(100 * Math.exp(-most)).toPrecision(2)} %`, colour: strong("warm") }];
  if (by === "kl" || by === "entropy") return [{ label: "0", colour: "transparent" }, { label: `${number(most)} nats`, colour: strong("warm") }];
  return null;
}
