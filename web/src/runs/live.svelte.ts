// The chosen runs' curves, updated from the server's event stream.
import { address, get, runPath, type Axis, type EvalPoint, type RunCurves, type RunState } from "../shared/api";

interface NewStep { run: string; stage: string; type: string; step: number; metrics: Record<string, number | null>; axes: Record<Exclude<Axis, "steps">, number | null> }

export class LiveCurves {
  /** Change counter. Curves are large, so they are plain objects, and the charts depend on this number instead. */
  version = $state(0);
  connected = $state(false);
  problem = $state<unknown>(null);
  readonly runs = new Map<string, RunCurves>();
  #source: EventSource | null = null;
  #names: string[] = [];
  readonly #onState: (state: RunState) => void;

  constructor(onState: (state: RunState) => void) {
    this.#onState = onState;
  }

  follow(names: string[]): void {
    if (names.join("\n") === this.#names.join("\n") && this.#source) return;
    this.close();
    this.#names = [...names];
    for (const known of [...this.runs.keys()]) if (!names.includes(known)) this.runs.delete(known);
    this.version++;
    if (!names.length) return;
    const source = new EventSource(address("live", { run: names }));
    this.#source = source;
    source.addEventListener("ready", () => {
      this.connected = true;
      for (const name of names) void this.#load(name);
    });
    source.addEventListener("step", (event) => this.#step(JSON.parse((event as MessageEvent<string>).data) as NewStep));
    source.addEventListener("eval", (event) => this.#eval(JSON.parse((event as MessageEvent<string>).data) as EvalPoint & { run: string }));
    source.addEventListener("state", (event) => this.#onState(JSON.parse((event as MessageEvent<string>).data) as RunState));
    source.addEventListener("reset", (event) => void this.#load((JSON.parse((event as MessageEvent<string>).data) as { run: string }).run));
    source.addEventListener("error", () => (this.connected = false));
  }

  close(): void {
    this.#source?.close();
    this.#source = null;
    this.connected = false;
  }

  async #load(name: string): Promise<void> {
    try {
      const found = await get<RunCurves>(runPath(name, "curves"));
      if (!this.#names.includes(name)) return;
      this.runs.set(name, found);
      this.problem = null;
      this.version++;
    } catch (error) {
      this.problem = error;
    }
  }

  #step(update: NewStep): void {
    const run = this.runs.get(update.run);
    if (!run) return;
    let stage = run.stages.find((one) => one.name === update.stage);
    if (!stage) {
      stage = { name: update.stage, type: update.type, done: 0, steps: update.step, metrics: {}, axes: { samples: { steps: [], values: [] }, tokens: { steps: [], values: [] }, seconds: { steps: [], values: [] } } };
      run.stages.push(stage);
    }
    // The complete curves were requested after the stream started, so a step may arrive twice.
    if (update.step <= stage.done) return;
    for (const [name, value] of Object.entries(update.metrics)) {
      const curve = (stage.metrics[name] ??= { steps: [], values: [] });
      curve.steps.push(update.step);
      curve.values.push(value);
    }
    for (const [name, curve] of Object.entries(stage.axes)) {
      const increment = update.axes[name as keyof NewStep["axes"]];
      if (increment === null || increment === undefined) continue;
      curve.steps.push(update.step);
      curve.values.push((curve.values.at(-1) ?? 0) + increment);
    }
    stage.done = update.step;
    this.version++;
  }

  #eval(update: EvalPoint & { run: string }): void {
    const run = this.runs.get(update.run);
    if (!run || run.evals.some((one) => one.stage === update.stage && one.step === update.step)) return;
    run.evals.push(update);
    this.version++;
  }
}
