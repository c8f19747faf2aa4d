// A run of the reader's own as the example of the figures. One choice for all figures.
import { get, learnOnly, runPath, type Grading, type Group, type RunState, type Step } from "../shared/api";

export const example = $state<{ runs: RunState[]; name: string; group: Group | null; step: Step | null; grading: Grading | null; trouble: string }>({ runs: [], name: "", group: null, step: null, grading: null, trouble: "" });

export async function listRuns(): Promise<void> {
  if (learnOnly) return;
  const found = await get<RunState[]>("runs").catch(() => []);
  example.runs = found.filter((run) => run.status !== "broken" && trained(run).length > 0);
}

export async function chooseRun(name: string): Promise<void> {
  Object.assign(example, { name, group: null, step: null, grading: null, trouble: "" });
  if (!name) return;
  try {
    const found = await findGroup(name);
    if (example.name === name) Object.assign(example, found);
  } catch {
    if (example.name === name) example.trouble = "No group of this run's grpo stages has a signal.";
  }
}

/** The figures explain GRPO: an advantage of PPO, say, is not what they show. */
const trained = (run: RunState): RunState["stages"] => run.stages.filter((stage) => stage.type === "grpo" && stage.done > 0);

/** A group with a signal: from the middle of the last stage that has one, where there is most to see. */
async function findGroup(name: string): Promise<{ step: Step; group: Group; grading: Grading }> {
  const run = example.runs.find((found) => found.name === name);
  for (const stage of run ? trained(run).reverse() : []) {
    for (const at of [Math.ceil(stage.done / 2), 1, stage.done]) {
      const step = await get<Step>(runPath(name, "step"), { stage: stage.name, step: at });
      const head = step.groups.find((found) => found.signal);
      if (!head) continue;
      const where = { stage: stage.name, step: at };
      const [group, grading] = await Promise.all([get<Group>(runPath(name, "group"), { ...where, position: head.position }), get<Grading>(runPath(name, "grading"), where)]);
      return { step, group, grading };
    }
  }
  throw new Error("no group");
}
