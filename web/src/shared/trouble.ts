// Links to the troubleshooting page, which is docs/troubleshooting.md shown in Learn. A test checks that every heading named here exists.
import { link } from "./route.svelte";

const SIGNS: [RegExp, string][] = [
  [/out of memory/i, "out-of-memory"],
  [/reward[^]*fail|fail[^]*reward/i, "rewards-fail"],
  [/sampler and (the )?learner/i, "sampler-and-learner-disagree"],
  [/without (a )?signal|no signal/i, "groups-have-no-signal"],
  [/entropy/i, "entropy-collapses"],
  [/truncated|lengths?\b/i, "lengths-explode"],
  [/\bnan\b|skipped|spike|rolled back|infinit/i, "nan-and-skipped-updates"],
  [/\bkl\b|clipped/i, "the-policy-moves-too-far"],
  [/held-out/i, "held-out-results-fall"],
];

/** The heading that a message names (`Troubleshooting, 'Groups have no signal'`), else the one that fits what it says, or null. */
export function troubleOf(what: string, advice = ""): string | null {
  const named = /Troubleshooting, '(.+?)'/.exec(what + advice)?.[1];
  return named?.toLowerCase().replaceAll(" ", "-") ?? SIGNS.find(([sign]) => sign.test(what))?.[1] ?? null;
}
/** A message without the reference to the documentation, which a link replaces. */
export const withoutReference = (text: string): string => text.replace(/[;,]? ?more: Troubleshooting, '.+?', in the documentation(\.?)$/, "$1");
/** Advice without that reference, in parts: every second one is code. */
export const adviceParts = (advice: string): string[] => withoutReference(advice).split("`");
export const troubleLink = (heading: string): string => link("learn", ["troubleshooting"], { at: heading });
