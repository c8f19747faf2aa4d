// What PPO and GRPO hold in memory and compute, by part. Bytes and operations follow from the number of parameters N:
// training weights in bf16 with fp32 master weights and Adam's two moments takes 2 + 2 (gradient) + 4 + 8 = 16 bytes each;
// a frozen model takes 2. Per token a forward pass costs 2N operations, forward and backward 6N.

export interface Shape { name: string; parameters: number; layers: number; width: number; kvWidth: number }

/** Llama 2's shapes, the usual yardstick; kvWidth counts the key heads only. */
export const SHAPES: Shape[] = [
  { name: "7B", parameters: 6.74e9, layers: 32, width: 4096, kvWidth: 4096 },
  { name: "13B", parameters: 13.0e9, layers: 40, width: 5120, kvWidth: 5120 },
  { name: "70B", parameters: 69.0e9, layers: 80, width: 8192, kvWidth: 1024 },
];

/** A model of any size: layers and width as models of that size have them, N ≈ 12 · layers · width² and width ≈ 128 · layers. */
export function shapeOf(parameters: number): Shape {
  const layers = Math.max(2, Math.round((parameters / (12 * 128 ** 2)) ** (1 / 3)));
  return { name: "", parameters, layers, width: 128 * layers, kvWidth: 128 * layers };
}

export interface Setting {
  groupSize: number; prompts: number; promptTokens: number; completionTokens: number;
  lora: boolean; reference: boolean; rewardModel: boolean;
}
export interface Part { name: string; ppo: number; grpo: number }

/** Adapters of rank 16 on every matrix hold about 0.6 % of a model's parameters. */
export const LORA_SHARE = 0.006;
const [TRAINED, FROZEN] = [16, 2];

export function memory(shape: Shape, setting: Setting): Part[] {
  const n = shape.parameters;
  const trained = setting.lora ? FROZEN * n + TRAINED * LORA_SHARE * n : TRAINED * n;
  // With adapters the reference is the policy with them switched off: nothing is held for it.
  const reference = setting.reference && !setting.lora ? FROZEN * n : 0;
  const perToken = 2 * shape.layers * shape.kvWidth * 2;
  const cache = perToken * setting.prompts * (setting.promptTokens + setting.groupSize * setting.completionTokens);
  const alone = perToken * setting.prompts * setting.groupSize * (setting.promptTokens + setting.completionTokens);
  return [
    { name: "policy", ppo: trained, grpo: trained },
    { name: "critic", ppo: trained, grpo: 0 },
    { name: "reference", ppo: reference, grpo: reference },
    { name: "reward model", ppo: setting.rewardModel ? FROZEN * n : 0, grpo: setting.rewardModel ? FROZEN * n : 0 },
    { name: "keys and values", ppo: alone, grpo: cache },
  ];
}

/** Operations of one step, at the same number of completions for both. */
export function compute(shape: Shape, setting: Setting): Part[] {
  const n = shape.parameters;
  const written = setting.prompts * setting.groupSize * setting.completionTokens;
  const read = setting.prompts * setting.groupSize * setting.promptTokens;
  const once = setting.prompts * setting.promptTokens;
  const [all, shared] = [written + read, written + once];
  return [
    { name: "sampling", ppo: 2 * n * all, grpo: 2 * n * shared },
    { name: "reward model", ppo: setting.rewardModel ? 2 * n * all : 0, grpo: setting.rewardModel ? 2 * n * all : 0 },
    { name: "reference", ppo: setting.reference ? 2 * n * all : 0, grpo: setting.reference ? 2 * n * shared : 0 },
    { name: "values", ppo: 2 * n * all, grpo: 0 },
    { name: "policy update", ppo: 6 * n * all, grpo: 6 * n * shared },
    { name: "critic update", ppo: 6 * n * all, grpo: 0 },
  ];
}
