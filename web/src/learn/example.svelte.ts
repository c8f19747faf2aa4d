// A run of the reader's own as the example of the figures. One choice for all figures.
import { get, learnOnly, runPath, type Group, type RunState, type Step } from "../shared/api";

export const example = $state<{ runs: RunState[]; name: string; group: Group | null; step: Step | null; trouble: string }>({ runs: [], name: "", group: null, step: null, trouble: "" });

export async function listRuns(): Promise<void> {
  if (learnOnly) return;
  const found = await get<RunState[]>("runs").catch(() => []);
  example.runs = found.filter((run) => run.completions > 0 && run.status !== "broken");
}

export async function chooseRun(name: string): Promise<void> {
  Object.assign(example, { name, group: null, step: null, trouble: "" });
  if (!name) return;
  try {
    const [step, group] = await findGroup(name);
    if (example.name === name) Object.assign(example, { step, group });
  } catch {
    if (example.name === name) example.trouble = "This run has no training group with a signal.";
  }
}

/** A group with a signal: from the middle of the last stage that has one, where there is most to see. */
async function findGroup(name: string): Promise<[Step, Group]> {
  const run = example.runs.find((found) => found.name === name);
  for (const stage of run?.stages.filter((part) => part.done > 0).reverse() ?? []) {
    for (const at of [Math.ceil(stage.done / 2), 1, stage.done]) {
      const step = await get<Step>(runPath(name, "step"), { stage: stage.name, step: at });
      const head = step.groups.find((found) => found.signal);
      if (head) return [step, await get<Group>(runPath(name, "group"), { stage: stage.name, step: at, position: head.position })];
    }
  }
  throw new Error("no group");
}
