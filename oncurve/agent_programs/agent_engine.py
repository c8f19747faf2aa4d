"""Samples rollouts of agents: runs the agents, and decodes what they ask for in this thread, with the learner's own weights.

A step's rollouts share one session of slots. The endpoint and the processes of the agents have threads of their own; these pass
requests to the session, and tell this thread when an agent has ended. A turn's tokens depend on the tokens before it and the
rollout's random numbers alone, not on what else is in flight.

A rollout that has ended is stored at once. A repeated step reads it from there, and runs only the agents that had not ended.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Sequence

import torch

from oncurve.agent_programs.agent_processes import AgentProcesses, AgentResult
from oncurve.agent_programs.conversation import build_group, final_sequence, rollout_json, rollout_of, to_completion
from oncurve.agent_programs.endpoint import AgentEndpoint, AgentRollout
from oncurve.engines.base import Engine, SampleKey, WeightSource, slots_for
from oncurve.engines.native.session import open_session
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import AgentProgram, Completion, Group, Outcome, Prompt
from oncurve.rng import derive_seed
from oncurve.runs.secrets import redact
from oncurve.runs.step_notes import note
from oncurve.serve.server import EngineLoop, ServedModel

FAILURE_LENGTH = 300
"""Characters kept of why an agent failed."""


class AgentEngine:
    """An engine whose prompts may have agents. Other prompts go to the engine that it wraps.

    If ``replies`` is set, rollouts are stored there when they end, and a repeated step reads them instead of running the
    agents again.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.replies, self.answers = engine, engine.replies, engine.answers
        self.policy, self.settings, self.shares_weights = engine.policy, engine.settings, engine.shares_weights
        self.weight_source: WeightSource | None = None
        self.counts, self.records_routing = engine.counts, False
        self._processes = AgentProcesses()
        self._endpoint: AgentEndpoint | None = None
        self._ignored: set[str] = set()
        self._has_said_rewriting = False

    @property
    def log_lines(self) -> tuple[str, ...]:
        return self.engine.log_lines

    def close(self) -> None:
        self._processes.close()
        if self._endpoint is not None:
            self._endpoint.close()
        self.engine.close()

    def sample(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        key: SampleKey,
        on_group: Callable[[int, Group], None] | None = None,
    ) -> list[Group]:
        if all(prompt.agent is None for prompt in prompts):
            self.engine.settings, self.engine.replies, before = self.settings, self.replies, self.engine.counts
            self.engine.records_routing = self.records_routing
            groups = self.engine.sample(prompts, group_size, sampling, key, on_group)
            self.counts += self.engine.counts - before
            return groups
        batch = RolloutBatch(self, prompts, group_size, sampling, key, on_group)
        batch.run()
        self._report(batch)
        return [batch.groups[index] for index in range(len(prompts))]

    def endpoint(self, program: AgentProgram) -> AgentEndpoint:
        if self._endpoint is None:
            self._endpoint = AgentEndpoint(program.port)
        return self._endpoint

    @property
    def processes(self) -> AgentProcesses:
        return self._processes

    def _report(self, batch: RolloutBatch) -> None:
        """Notes for the run's log."""
        total = len(batch.prompts) * batch.group_size
        if 0 < batch.replayed < total:
            again = total - batch.replayed
            note("agents", f"{batch.replayed} of {total} rollouts are those of an earlier try; {again} agents ran again")
        if batch.failures:
            note("agents", f"{len(batch.failures)} of {total} agents failed; the first: {batch.failures[0]}")
        if batch.rewriting is not None and not self._has_said_rewriting:
            self._has_said_rewriting = True
            note("history", batch.rewriting)
        new = batch.ignored - self._ignored
        if new:
            self._ignored |= new
            note("agents", f"agents ask for {', '.join(sorted(new))}: ignored, the stage's own sampling settings apply")


class _TrainingLoop(EngineLoop):
    """An error of the engine ends the run, and not only the requests in flight."""

    def _fail(self, error: Exception) -> None:
        raise error


class RolloutBatch:
    """The rollouts of one call of `sample`."""

    def __init__(
        self,
        engine: AgentEngine,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        key: SampleKey,
        on_group: Callable[[int, Group], None] | None,
    ) -> None:
        self.engine, self.prompts, self.group_size, self.sampling, self.key = engine, prompts, group_size, sampling, key
        self.on_group = on_group
        self.groups: dict[int, Group] = {}
        self.replayed, self.failures, self.ignored = 0, list[str](), set[str]()
        self.rewriting: str | None = None
        self._done: dict[tuple[int, int], Completion] = {}
        self._waiting: deque[tuple[int, int]] = deque()
        self._running: dict[int, AgentRollout] = {}

    @property
    def program(self) -> AgentProgram:
        program = self.prompts[0].agent
        assert program is not None
        return program

    def run(self) -> None:
        for index in range(len(self.prompts)):
            for sample in range(self.group_size):
                stored = None if self.engine.replies is None else self.engine.replies.get(self._record_key(index, sample))
                if stored is None:
                    self._waiting.append((index, sample))
                else:
                    self.replayed += 1
                    self._add(index, sample, rollout_of(stored))
        if self._waiting:
            self._run_agents()

    def _run_agents(self) -> None:
        # The number of slots does not depend on which agents run again, so a resumed step decodes at the same shape.
        slots = min(slots_for(self.engine, len(self.prompts) * self.group_size), self.program.at_once)
        with torch.no_grad():
            draft = self.engine.settings.draft
            session = open_session(self.engine.policy, slots, self.sampling.max_new_tokens, draft)
        before = session.runner.counts  # of the sampler's self-check
        self.loop = _TrainingLoop(session)
        self.served = ServedModel(self.program.model_name, self.engine.policy, self.loop)
        try:
            for _ in range(min(self.program.at_once, len(self._waiting))):
                self._start_next()
            self.loop.run()
        finally:
            for number, rollout in self._running.items():
                self.engine.processes.stop(number)
                self.engine.endpoint(self.program).remove(rollout)
            self.engine.counts += session.runner.counts - before
            session.close()

    def _start_next(self) -> None:
        index, sample = self._waiting.popleft()
        prompt = self.prompts[index]
        rollout = AgentRollout(prompt, sample, self.sampling, self.key, self.served)
        seed = derive_seed(self.key.seed, f"agent/{self.key.step}/{prompt.id}/{sample}")
        environment = self.engine.endpoint(self.program).add(rollout) | {"ONCURVE_SEED": str(seed)}

        def on_end(result: AgentResult) -> None:
            self.loop.call(lambda: self._end(number, index, rollout, result))

        number = self.engine.processes.start(self.program, prompt.columns, environment, on_end)
        self._running[number] = rollout

    def _end(self, number: int, index: int, rollout: AgentRollout, result: AgentResult) -> None:
        """An agent has ended: its rollout is complete, and the next one starts."""
        del self._running[number]
        self.engine.endpoint(self.program).remove(rollout)
        sequences, policy = rollout.end(), self.engine.policy
        self.ignored |= rollout.ignored
        self.rewriting = self.rewriting or rollout.rewriting
        outcome = read_outcome(result, rollout, bool(sequences), self.program.timeout_s)
        if outcome.failure is not None:
            self.failures.append(outcome.failure)
        last = final_sequence(sequences)
        completion = to_completion(sequences, "" if last is None else policy.decode(last.text_ids), outcome)
        if self.engine.replies is not None:
            self.engine.replies.add(self._record_key(index, rollout.sample), rollout_json(completion))
        self._add(index, rollout.sample, completion)
        if self._waiting:
            self._start_next()
        elif not self._running:
            self.loop.stop()

    def _add(self, index: int, sample: int, completion: Completion) -> None:
        self._done[index, sample] = completion
        of_prompt = [self._done.get((index, other)) for other in range(self.group_size)]
        completions = [completion for completion in of_prompt if completion is not None]
        if len(completions) < self.group_size:
            return
        self.groups[index] = build_group(self.prompts[index], completions)
        if self.on_group is not None:
            self.on_group(index, self.groups[index])

    def _record_key(self, index: int, sample: int) -> str:
        return f"rollout/{self.key.seed}/{self.key.step}/{self.prompts[index].id}/{sample}"


def read_outcome(result: AgentResult, rollout: AgentRollout, has_calls: bool, timeout_s: float) -> Outcome:
    """An agent's reward, or why its rollout failed."""
    refusal = f"; its last refused call: {rollout.refusal}" if rollout.refusal else ""
    reward: object = rollout.reward
    try:
        line = json.loads(result.last_line)
    except (ValueError, RecursionError):
        line = None
    if isinstance(line, dict) and "reward" in line:
        reward = line["reward"]
    failure = None
    if result.is_late:
        failure = f"the agent took more than {timeout_s:g} s and was killed{refusal}"
    elif result.code:
        how = f"signal {-result.code}" if result.code < 0 else f"exit code {result.code}"
        said = next((text.strip() for text in reversed(result.stderr.splitlines()) if text.strip()), "")
        failure = f"the agent ended with {how}{f': {said}' if said else ''}{refusal}"
    elif not has_calls:
        failure = f"the agent ended without a completed call to the model{refusal}"
    elif reward is not None and not (isinstance(reward, int | float) and abs(reward) <= sys.float_info.max):
        failure = f"the agent reported the reward {reward!r:.40}, which is not a finite number"
    if failure is not None:
        return Outcome(None, redact(failure)[:FAILURE_LENGTH])
    return Outcome(None if reward is None else float(reward))  # type: ignore[arg-type]
