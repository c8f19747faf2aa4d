// Studies of estimators on problems small enough for the exact result. A test compares them with the closed forms in Python.
import { advantages } from "./advantages";
import { k1, k2, k3 } from "./loss";
import { divergence, draw, random, softmax } from "./policy";
import type { Baseline } from "../shared/api";

export interface BaselineStudy { truth: number; expected: number; mean: number; std: number; silent: number; estimates: number[] }

const meanOf = (values: readonly number[]): number => values.reduce((sum, value) => sum + value, 0) / Math.max(1, values.length);
const stdOf = (values: readonly number[]): number => { const mean = meanOf(values); return Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / Math.max(1, values.length - 1)); };

/** Gradients of the logit of a right-or-wrong policy, each from one group. The truth is p (1 − p); d log π / d logit is 1 − p if right, −p if wrong. */
export function baselineStudy(p: number, size: number, baseline: Baseline, groups: number, seed: number): BaselineStudy {
  const uniform = random(seed);
  let silent = 0;
  const estimates = Array.from({ length: groups }, () => {
    const rewards = Array.from({ length: size }, () => Number(uniform() < p));
    const graded = advantages([rewards], baseline, "none", 0)[0] ?? [];
    silent += Number(rewards.every((reward) => reward === rewards[0]));
    return meanOf(graded.map((advantage, index) => advantage * (rewards[index] ? 1 - p : -p)));
  });
  const truth = p * (1 - p);
  return { truth, expected: baseline === "mean" ? truth * (1 - 1 / size) : truth, mean: meanOf(estimates), std: stdOf(estimates), silent, estimates };
}

export interface KlStudy { policy: number[]; reference: number[]; exact: number; estimators: { name: string; mean: number; std: number; lowest: number; gradientError: number }[] }

/** k1, k2 and k3 on sampled tokens, and how far the expected gradient of each as a loss is from the gradient of the KL (exact sums). */
export function klStudy(logits: readonly number[], referenceLogits: readonly number[], samples: number, seed: number): KlStudy {
  const [policy, reference, uniform] = [softmax(logits), softmax(referenceLogits), random(seed)];
  const log = (of: readonly number[], one: number): number => Math.log(of[one] ?? 1);
  const sampled = Array.from({ length: samples }, () => draw(policy, uniform()));
  // E[c(o) ∇ log π(o)] by logit, with ∂ log π(o) / ∂ logit_j = 1[o = j] − π(j).
  const gradient = (weight: (d: number) => number): number[] =>
    policy.map((pj, j) => policy.reduce((sum, po, o) => sum + po * weight(log(reference, o) - log(policy, o)) * (Number(o === j) - pj), 0));
  const truth = gradient((d) => -d);
  const size = Math.hypot(...truth);
  const error = (of: number[]): number => (size < 1e-12 ? 0 : Math.hypot(...of.map((value, index) => value - (truth[index] ?? 0))) / size);
  const ROWS = [
    { name: "k1 = −d", of: k1, weight: () => 1 },
    { name: "k2 = d²/2", of: k2, weight: (d: number) => -d },
    { name: "k3 = eᵈ − d − 1", of: k3, weight: (d: number) => 1 - Math.exp(d) },
  ];
  const estimators = ROWS.map(({ name, of, weight }) => {
    const values = sampled.map((one) => of(log(policy, one), log(reference, one)));
    return { name, mean: meanOf(values), std: stdOf(values), lowest: Math.min(...values), gradientError: error(gradient(weight)) };
  });
  return { policy, reference, exact: divergence(policy, reference), estimators };
}

/** The probability that a group of a prompt solved with probability p has both a right and a wrong answer. */
export const signalChance = (p: number, size: number): number => 1 - p ** size - (1 - p) ** size;

/** What dividing by the std makes of a prompt that is solved with probability p: its gradient's weight, and the objective whose gradient that is. */
export const promptWeight = (p: number): { weight: number; objective: number } => ({ weight: 1 / Math.sqrt(p * (1 - p)), objective: 2 * Math.asin(Math.sqrt(p)) });
