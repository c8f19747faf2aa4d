// A run's best step in one line, with its interval and levels.
import type { Best, EvalPoint, RunState } from "../shared/api";
import { percent, score } from "../shared/figures";
import { interval } from "./charts";

const ACCURACY = "held-out accuracy";
export const bestLabel = (best: Best): string => (best.metric === ACCURACY ? "held-out" : best.metric);
export const bestValue = (best: Best): string => (best.metric === ACCURACY ? percent(best.value, 1) : score(best.value));

/** The evaluation that measured the best accuracy; null if something else is best. */
export const bestEval = (run: RunState): EvalPoint | null =>
  (run.best?.metric === ACCURACY && run.evals.find((one) => one.stage === run.best?.stage && one.step === run.best.step)) || null;

/** "93.3 % (90 to 96)", "0.52" for a held-out reward, or "loss 0.30": the interval is Wilson's, 95 %, over the evaluated prompts. */
export function written(run: RunState): string {
  if (!run.best) return "–";
  const measured = bestEval(run);
  if (measured?.accuracy == null) return `${run.best.metric.startsWith("held-out") ? "" : `${run.best.metric} `}${bestValue(run.best)}`;
  const [low, high] = interval(measured.accuracy, measured.asked);
  return `${bestValue(run.best)} (${(100 * low).toFixed(0)} to ${(100 * high).toFixed(0)})`;
}

/** Progress through all planned steps. */
export function progress(run: RunState): number {
  const planned = run.stages.reduce((sum, stage) => sum + stage.steps, 0);
  return planned ? run.stages.reduce((sum, stage) => sum + (stage.finished ? stage.steps : stage.done), 0) / planned : 0;
}
