// Ratio, clip, KL and the GRPO loss per token, as in oncurve/algos. A test compares the two.

/** Log-ratios are capped before the exponential, as in the trainer. */
export const LOG_CAP = 20;

export const ratio = (logpNew: number, logpOld: number): number => Math.exp(Math.min(logpNew - logpOld, LOG_CAP));

export const clip = (value: number, low: number, high: number): number => Math.min(Math.max(value, 1 - low), 1 + high);

export interface Clipped { value: number; clipped: boolean }

/** min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A), and whether the token is clipped. */
export function surrogate(rho: number, advantage: number, low: number, high: number): Clipped {
  const value = Math.min(rho * advantage, clip(rho, low, high) * advantage);
  return { value, clipped: (rho > 1 + high && advantage > 0) || (rho < 1 - low && advantage < 0) };
}

export const k1 = (logp: number, logpRef: number): number => logp - logpRef;
export const k2 = (logp: number, logpRef: number): number => 0.5 * (logpRef - logp) ** 2;

/** e^d − d − 1 with d = log π_ref − log π: never negative. */
export function k3(logp: number, logpRef: number): number {
  const d = Math.min(logpRef - logp, LOG_CAP);
  return Math.expm1(d) - d;
}

export interface Sampled { logpNew: number[]; logpOld: number[]; logpRef: number[]; advantage: number }
export interface Loss { loss: number; policy: number; kl: number; clippedShare: number; gradient: number[][] }

/** −mean over completions of (1/|o|) Σ_t [surrogate − β k3], with its derivative by each log-prob of the policy. */
export function grpoLoss(completions: readonly Sampled[], low: number, high: number, beta: number): Loss {
  const count = Math.max(completions.length, 1);
  let [policy, kl, clipped, tokens] = [0, 0, 0, 0];
  const gradient = completions.map((completion) => {
    const share = 1 / (count * Math.max(completion.logpNew.length, 1));
    return completion.logpNew.map((logp, t) => {
      const rho = ratio(logp, completion.logpOld[t] ?? 0);
      const token = surrogate(rho, completion.advantage, low, high);
      const d = Math.min((completion.logpRef[t] ?? 0) - logp, LOG_CAP);
      policy -= share * token.value;
      kl += share * k3(logp, completion.logpRef[t] ?? 0);
      clipped += Number(token.clipped);
      tokens += 1;
      return -share * (token.clipped ? 0 : rho * completion.advantage) + beta * share * (1 - Math.exp(d));
    });
  });
  return { loss: policy + beta * kl, policy, kl, clippedShare: tokens ? clipped / tokens : 0, gradient };
}
