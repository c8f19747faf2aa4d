// A minimal policy: a softmax over a handful of completions. Small enough to show in full, and it really learns.
import { advantages } from "./advantages";
import { grpoLoss, type Loss, type Sampled } from "./loss";

export function softmax(logits: readonly number[]): number[] {
  const top = Math.max(...logits);
  const powers = logits.map((logit) => Math.exp(logit - top));
  const sum = powers.reduce((one, other) => one + other, 0);
  return powers.map((power) => power / sum);
}

/** Uniform numbers in [0, 1) from a seed (mulberry32), so that a restarted demo shows the same thing. */
export function random(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

export function draw(probabilities: readonly number[], uniform: number): number {
  let sum = 0;
  for (const [index, probability] of probabilities.entries()) {
    sum += probability;
    if (uniform < sum) return index;
  }
  return probabilities.length - 1;
}

export interface Settings { groupSize: number; clip: number; beta: number; updates: number; rate: number; eps: number; scale: "group" | "none"; /** Rewards are chances of a 1 instead of values. */ noisy?: boolean }
export interface Step { before: number[]; sampled: number[]; rewards: number[]; advantages: number[]; losses: Loss[]; path: number[][]; logits: number[]; after: number[]; kl: number }

/** One GRPO step: sample a group, score it, compute its advantages, and make μ updates by plain gradient descent. */
export function step(logits: readonly number[], reference: readonly number[], rewardOf: readonly number[], settings: Settings, uniform: () => number): Step {
  const before = softmax(logits);
  const sampled = Array.from({ length: settings.groupSize }, () => draw(before, uniform()));
  const rewards = sampled.map((one) => (settings.noisy ? Number(uniform() < (rewardOf[one] ?? 0)) : (rewardOf[one] ?? 0)));
  const graded = advantages([rewards], "mean", settings.scale, settings.eps)[0] ?? [];
  let now = [...logits];
  const losses: Loss[] = [];
  const path: number[][] = [];
  for (let update = 0; update < settings.updates; update++) {
    const loss = grpoLoss(asSampled(sampled, graded, softmax(now), before, reference), settings.clip, settings.clip, settings.beta);
    now = descend(now, sampled, loss, settings.rate);
    losses.push(loss);
    path.push(softmax(now));
  }
  const after = softmax(now);
  return { before, sampled, rewards, advantages: graded, losses, path, logits: now, after, kl: divergence(after, reference) };
}

/** The sampled answers whose probability changed against the sign of their advantage. Answers share the probability, so another's larger change can outweigh an advantage. */
export function movedAgainst(one: Step): number[] {
  const against = one.sampled.filter((answer, index) => (one.advantages[index] ?? 0) * ((one.after[answer] ?? 0) - (one.before[answer] ?? 0)) < 0);
  return [...new Set(against)];
}

export function asSampled(sampled: readonly number[], graded: readonly number[], now: readonly number[], old: readonly number[], reference: readonly number[]): Sampled[] {
  const log = (of: readonly number[], one: number): number[] => [Math.log(of[one] ?? 1)];
  return sampled.map((one, index) => ({ logpNew: log(now, one), logpOld: log(old, one), logpRef: log(reference, one), advantage: graded[index] ?? 0 }));
}

/** ∂ log π(a) / ∂ logit_j = 1[a = j] − π(j). */
export function descend(logits: readonly number[], sampled: readonly number[], loss: Loss, rate: number): number[] {
  const probabilities = softmax(logits);
  return logits.map((logit, j) => {
    const slope = sampled.reduce((sum, one, index) => sum + (loss.gradient[index]?.[0] ?? 0) * (Number(one === j) - (probabilities[j] ?? 0)), 0);
    return logit - rate * slope;
  });
}

/** KL(p ‖ q) as the exact sum: with so few completions no estimator is needed. */
export function divergence(p: readonly number[], q: readonly number[]): number {
  return p.reduce((sum, probability, index) => sum + (probability > 0 ? probability * Math.log(probability / (q[index] ?? 1)) : 0), 0);
}

/** `count` steps from the same start, which is also the reference. */
export function trajectory(start: readonly number[], rewardOf: readonly number[], settings: Settings, seed: number, count: number): Step[] {
  const [uniform, reference] = [random(seed), softmax(start)];
  const found: Step[] = [];
  let logits = [...start];
  for (let at = 0; at < count; at++) {
    const one = step(logits, reference, rewardOf, settings, uniform);
    found.push(one);
    logits = one.logits;
  }
  return found;
}
