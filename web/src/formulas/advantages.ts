// Advantages as the trainer computes them (oncurve/algos/advantages.py). A test compares the two.
import type { Baseline, Gradable, Scale } from "../shared/api";

/** A failed reward is null, not 0: it is excluded from mean and std, and its completion gets no advantage. */
export type Reward = number | null;

export interface Curve { count: number; mean: number; std: number; flat: boolean }

/** Count, mean and std (n − 1). `flat` if there are fewer than 2 values or all are equal up to 16 units in the last place. */
export function curveOf(rewards: readonly Reward[]): Curve {
  return weightedCurve(rewards.flatMap((reward) => (reward !== null && Number.isFinite(reward) ? [{ value: reward, count: 1 }] : [])));
}

/** The same for values that occur several times. */
function weightedCurve(values: readonly { value: number; count: number }[]): Curve {
  let [count, sum, highest, lowest] = [0, 0, -Infinity, Infinity];
  for (const one of values) {
    count += one.count;
    sum += one.count * one.value;
    highest = Math.max(highest, one.value);
    lowest = Math.min(lowest, one.value);
  }
  const mean = sum / Math.max(count, 1);
  const std = Math.sqrt(values.reduce((total, one) => total + one.count * (one.value - mean) ** 2, 0) / Math.max(count - 1, 1));
  const rounding = 16 * Number.EPSILON * Math.max(Math.abs(highest), Math.abs(lowest));
  return { count, mean, std, flat: count < 2 || highest - lowest <= rounding };
}

const usesGroup = (baseline: Baseline, scale: Scale): boolean => baseline !== "none" || scale === "group";

/** A_i = (r_i − b_i) / (s + eps). Exactly 0 for equal rewards, failed rewards, and groups of fewer than 2. */
export function advantages(groups: readonly (readonly Reward[])[], baseline: Baseline, scale: Scale, eps: number): number[][] {
  const batch = curveOf(scale === "batch" ? groups.flat() : []);
  return groups.map((rewards) => {
    const group = curveOf(rewards);
    const zero = (usesGroup(baseline, scale) && (group.count < 2 || group.flat)) || (scale === "batch" && batch.flat);
    const divisor = scale === "group" ? group.std + eps : scale === "batch" ? batch.std + eps : 1;
    return rewards.map((reward) => {
      if (zero || reward === null || !Number.isFinite(reward)) return 0;
      if (baseline === "none") return reward / divisor;
      const centred = reward - group.mean;
      return (baseline === "leave_one_out" ? centred * (group.count / Math.max(group.count - 1, 1)) : centred) / divisor;
    });
  });
}

/** Normalises all step rewards of the group to r~. A token's advantage is the sum of r~ over the steps that end at or after it. */
export function processAdvantages(steps: readonly (readonly [number, number][])[], lengths: readonly number[], eps: number): number[][] {
  const curve = curveOf(steps.flatMap((of) => of.map(([, reward]) => reward)));
  return steps.map((of, index) => {
    const found = new Array<number>(lengths[index] ?? 0).fill(0);
    if (curve.flat) return found;
    for (const [end, reward] of of) for (let t = 0; t <= end && t < found.length; t++) found[t] = (found[t] ?? 0) + (reward - curve.mean) / (curve.std + eps);
    return found;
  });
}

export interface GradeSettings { baseline: Baseline; scale: Scale; eps: number; mask_cut: boolean }

/** The advantage of every token of one group of a step; null for a completion that is not graded. */
export function gradeTokens(batch: readonly (readonly Gradable[])[], position: number, settings: GradeSettings): (number[] | null)[] {
  const outcomes = advantages(batch.map((group) => group.map((one) => one.reward)), settings.baseline, settings.scale, settings.eps);
  const tokens = (index: number): (number[] | null)[] => groupTokens(batch[index] ?? [], outcomes[index] ?? [], settings);
  const found = tokens(position);
  if (settings.scale !== "whiten") return found;
  const values: { value: number; count: number }[] = [];
  for (const [index, group] of batch.entries()) {
    for (const [at, advantage] of tokens(index).entries()) {
      const mask = group[at]?.mask ?? null;
      if (advantage && !mask && !group[at]?.steps) values.push({ value: advantage[0] ?? 0, count: advantage.length });
      else if (advantage) for (let t = 0; t < advantage.length; t++) if (!mask || mask[t]) values.push({ value: advantage[t] ?? 0, count: 1 });
    }
  }
  const curve = weightedCurve(values.filter(({ count }) => count > 0));
  const scale = curve.flat ? 0 : 1 / (curve.std + settings.eps);
  return found.map((one) => one?.map((value) => Math.fround((value - curve.mean) * scale)) ?? null);
}

function groupTokens(group: readonly Gradable[], outcomes: readonly number[], settings: GradeSettings): (number[] | null)[] {
  const rewarded = group.filter(({ reward }) => reward !== null).length;
  const steps = group.map((one) => (one.failed ? [] : (one.steps ?? [])));
  const process = steps.flat().length >= 2 ? processAdvantages(steps, group.map(({ length }) => length), settings.eps) : null;
  return group.map((one, index) => {
    const hasOutcome = one.reward !== null && (!usesGroup(settings.baseline, settings.scale) || rewarded >= 2);
    const graded = (hasOutcome || (process !== null && one.steps !== null)) && !one.failed && !(settings.mask_cut && one.truncated);
    return graded ? Array.from({ length: one.length }, (_, t) => Math.fround((process?.[index]?.[t] ?? 0) + (outcomes[index] ?? 0))) : null;
  });
}

/** A completion's advantage as lists show it: the mean over the tokens that the policy wrote. */
export function meanAdvantage(tokens: readonly number[] | null, mask: readonly boolean[] | null): number | null {
  const own = tokens?.filter((_, t) => !mask || mask[t]) ?? [];
  return own.length ? own.reduce((sum, value) => sum + value, 0) / own.length : null;
}
