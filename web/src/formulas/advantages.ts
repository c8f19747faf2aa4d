// Advantages as the trainer computes them (oncurve/algos/advantages.py). A test compares the two.
import type { Baseline, Scale } from "../shared/api";

/** A failed reward is null, not 0: it is excluded from mean and std, and its completion gets no advantage. */
export type Reward = number | null;

export interface Curve { count: number; mean: number; std: number; flat: boolean }

/** Count, mean and std (n − 1). `flat` if there are fewer than 2 values or all are equal up to 16 units in the last place. */
export function curveOf(rewards: readonly Reward[]): Curve {
  const values = rewards.filter((reward): reward is number => reward !== null && Number.isFinite(reward));
  const count = values.length;
  const mean = values.reduce((sum, value) => sum + value, 0) / Math.max(count, 1);
  const std = Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / Math.max(count - 1, 1));
  const [highest, lowest] = [Math.max(...values), Math.min(...values)];
  const rounding = 16 * Number.EPSILON * Math.max(Math.abs(highest), Math.abs(lowest));
  return { count, mean, std, flat: count < 2 || highest - lowest <= rounding };
}

/** A_i = (r_i − b_i) / (s + eps). Exactly 0 for equal rewards, failed rewards, and groups of fewer than 2. */
export function advantages(groups: readonly (readonly Reward[])[], baseline: Baseline, scale: Scale, eps: number): number[][] {
  const batch = curveOf(groups.flat());
  return groups.map((rewards) => {
    const group = curveOf(rewards);
    const compared = baseline !== "none" || scale === "group";
    const zero = (compared && (group.count < 2 || group.flat)) || (scale === "batch" && batch.flat);
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
