"""The tables of ``run.db``. Plain SQLite: any tool can read a run, with or without Oncurve.

- Ids are dense and in the order of recording: the number of rows is the largest id, a page of a million completions is a range
  scan, and a resumed run assigns the same ids as an uninterrupted one.
- Times are only in columns called ``created``, ``started``, ``finished``, ``seconds`` and in ``events``. Everything else is the
  same for two identical runs, except metrics that measure the machine (``oncurve.runs.metrics``: ``repeatable``).
- Token arrays are little-endian blobs, one row per completion, in a table of their own, so that lists of completions don't read
  them. NULL stands for the usual value: no ``loss_mask`` means all True; no ``sampled_logps`` or ``raw_logps`` means equal to
  ``logps``; one number in ``advantages`` means that number at every token. An eval without ``accuracy`` had no verifiable
  reward; its mean reward is in its ``metrics``.
- ``replies`` holds the results of non-deterministic rewards for the groups of a step, including groups that dynamic sampling
  dropped. They survive a resume, so that a repeated step gets the same rewards.
- ``versions`` has a row only if the weights may have changed while a completion was sampled (asynchronous runs): JSON pairs of
  the first token and the number of updates of the weights that sampled it and the tokens after it.
"""

from __future__ import annotations

FORMAT = 1
"""Version of these tables. A reader refuses a larger one."""

APPLICATION_ID = 0x4F6E6376
"""'Oncv' in the file's header: identifies a run's database."""

TABLES = """
CREATE TABLE meta (
    format INTEGER NOT NULL, oncurve TEXT NOT NULL, created REAL NOT NULL
);
CREATE TABLE stages (
    name TEXT PRIMARY KEY, type TEXT NOT NULL, position INTEGER NOT NULL UNIQUE, steps INTEGER NOT NULL,
    started REAL NOT NULL, finished REAL
) WITHOUT ROWID;
CREATE TABLE steps (
    stage TEXT NOT NULL REFERENCES stages(name) ON DELETE CASCADE, step INTEGER NOT NULL,
    seconds REAL NOT NULL, created REAL NOT NULL, PRIMARY KEY (stage, step)
) WITHOUT ROWID;
CREATE TABLE metrics (
    stage TEXT NOT NULL, step INTEGER NOT NULL, name TEXT NOT NULL, value REAL,
    PRIMARY KEY (stage, name, step), FOREIGN KEY (stage, step) REFERENCES steps(stage, step) ON DELETE CASCADE
) WITHOUT ROWID;
CREATE INDEX metrics_by_step ON metrics (stage, step);
CREATE TABLE evals (
    stage TEXT NOT NULL REFERENCES stages(name) ON DELETE CASCADE, step INTEGER NOT NULL, accuracy REAL, asked INTEGER NOT NULL,
    by_difficulty TEXT NOT NULL, metrics TEXT NOT NULL, created REAL NOT NULL, PRIMARY KEY (stage, step)
) WITHOUT ROWID;
CREATE TABLE groups (
    id INTEGER PRIMARY KEY, stage TEXT NOT NULL REFERENCES stages(name) ON DELETE CASCADE, step INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('train', 'eval')), position INTEGER NOT NULL,
    prompt_id TEXT NOT NULL, prompt TEXT, messages TEXT, columns TEXT NOT NULL, prompt_ids BLOB NOT NULL, has_signal INTEGER
);
CREATE UNIQUE INDEX groups_by_step ON groups (stage, step, kind, position);
CREATE INDEX groups_by_prompt ON groups (prompt_id);
CREATE TABLE completions (
    id INTEGER PRIMARY KEY, group_id INTEGER NOT NULL REFERENCES groups(id) ON DELETE CASCADE, position INTEGER NOT NULL,
    text TEXT NOT NULL, stop TEXT NOT NULL, length INTEGER NOT NULL, total REAL, graded INTEGER, failure TEXT, advantage REAL
);
CREATE UNIQUE INDEX completions_by_group ON completions (group_id, position);
CREATE INDEX completions_by_failure ON completions (failure, id) WHERE failure IS NOT NULL;
CREATE TABLE aspects (
    completion_id INTEGER NOT NULL REFERENCES completions(id) ON DELETE CASCADE, position INTEGER NOT NULL, name TEXT NOT NULL,
    value REAL, weight REAL NOT NULL, failure TEXT, reason TEXT, steps TEXT, PRIMARY KEY (completion_id, position)
) WITHOUT ROWID;
CREATE TABLE tokens (
    completion_id INTEGER PRIMARY KEY REFERENCES completions(id) ON DELETE CASCADE,
    token_ids BLOB NOT NULL, loss_mask BLOB, logps BLOB NOT NULL, sampled_logps BLOB, raw_logps BLOB,
    advantages BLOB, learner_logps BLOB, ratio BLOB, entropy BLOB, clipped BLOB, kl BLOB
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, stage TEXT, step INTEGER,
    message TEXT NOT NULL, data TEXT NOT NULL
);
"""

ADDED = """
CREATE TABLE IF NOT EXISTS replies (
    stage TEXT NOT NULL, step INTEGER NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL, reply TEXT NOT NULL,
    PRIMARY KEY (stage, step, kind, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS versions (
    completion_id INTEGER PRIMARY KEY REFERENCES completions(id) ON DELETE CASCADE, versions TEXT NOT NULL
);
"""
"""Tables that are newer than the first runs. A writer creates them if they are missing."""
