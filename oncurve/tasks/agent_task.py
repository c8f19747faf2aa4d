"""The task `agent`: rollouts are made by a program of the user's, which calls the policy's endpoint."""

from __future__ import annotations

import errno
import json
import shlex
import shutil
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from oncurve.errors import MissingPackage, RecipeError, pip_install
from oncurve.plugins import load_function
from oncurve.recipe.defaults import REPORTED
from oncurve.recipe.schema import sections
from oncurve.recipe.schema.base import Section, Share
from oncurve.records import AgentProgram, History, Prompt
from oncurve.tasks.data.file_task import check_has_file, read_rows, split_rows
from oncurve.tasks.data.prompt_list import PromptList


class AgentOptions(Section):
    """Your own agent program. It gets a row of a file and calls the model through an OpenAI-compatible URL as often as it
    likes; the model is trained on all of these calls."""

    path: str | None = None
    """The file of rows, in the formats of `file`. An agent gets its row as JSON on standard input, or as its function's
    argument."""
    heldout_path: str | None = None
    """A file for evaluation; `task.heldout` rows of it are used. Unset: rows of `path` are held out."""
    heldout_share: Share = 0.2
    """Without `heldout_path`: `task.heldout` rows are held out, but at most this fraction of the file."""
    command: str | None = None
    """The program, such as `python my_agent.py`. It finds the endpoint in the environment variables OPENAI_BASE_URL and
    OPENAI_API_KEY, as OpenAI's clients do, and the model's name in OPENAI_MODEL. If its last line of output is a JSON object
    with a `reward`, that is its reward."""
    function: str | None = None
    """Instead of a command: `file.py:function`, called with the row as a dict, sync or `async def`. It returns its reward, a
    dict with a `reward`, or None. Each call has a process of its own."""
    timeout_s: PositiveFloat = 600.0
    """Seconds after which an agent is killed, with every process that it started. Its rollout counts as failed."""
    at_once: PositiveInt = 32
    """Agents that run at the same time."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """Port of the endpoint, on 127.0.0.1; 0: any free one."""
    model_name: str = "policy"
    """The name by which agents ask for the model, for those that can't read OPENAI_MODEL."""
    sandbox: bool = False
    """Run the command in bubblewrap: it can read files but write only to an empty /tmp of its own, and sees no other process.
    It keeps the network, because it calls the endpoint."""
    history: History = "tokens"
    """What the model reads in a call that extends an earlier one, if the chat template would write earlier turns differently
    from how they were sampled. `tokens`: the tokens as sampled. `template`: what the template writes; a new sequence begins
    there."""
    difficulty: str | None = None
    """Column under which held-out accuracy is reported."""

    @property
    def program(self) -> AgentProgram:
        endpoint = (self.at_once, self.port, self.model_name)
        return AgentProgram(self.command, self.function, self.timeout_s, *endpoint, self.sandbox, self.history)


class AgentTask(PromptList):
    """Rows for agents. Their reward is what they report, unless the recipe has rewards."""

    @property
    def default_rewards(self) -> tuple[sections.Reward, ...]:
        return REPORTED


def build_agent_task(config: sections.Task, options: AgentOptions) -> PromptList:
    """Reads the rows, and refuses a program that can't be started."""
    check_has_file(options.path, options.heldout_path)
    check_program(options)
    prompts = [] if options.path is None else _read(options.path, options, "train", "task.path")
    heldout = options.heldout_path
    candidates = prompts if heldout is None else _read(heldout, options, "heldout", "task.heldout_path")
    rows = split_rows(prompts, candidates, [], config, options)
    return AgentTask(rows.train, rows.heldout, (), None, rows.rows, rows.log_lines)


def _read(path: str, options: AgentOptions, split: str, key: str) -> list[Prompt]:
    file, program = Path(path), options.program
    return [_prompt(f"{file.name}/{split}/{line}", dict(row), options, program) for line, row in read_rows(file, key)]


def _prompt(name: str, row: dict[str, Any], options: AgentOptions, program: AgentProgram) -> Prompt:
    """The row as people read it is its `prompt`, if that is a text, else the row itself."""
    text = (
        row["prompt"]
        if isinstance(row.get("prompt"), str) and row["prompt"]
        else json.dumps(row, ensure_ascii=False, default=str)
    )
    columns = row if options.difficulty is None else {**row, "difficulty": row.get(options.difficulty)}
    return Prompt(name, text=text, columns=columns, agent=program)


def check_program(options: AgentOptions) -> None:
    """Raises RecipeError if there is no program or two, if it can't be started, or if the port is taken."""
    if (options.command is None) == (options.function is None):
        what = "missing" if options.command is None else "next to task.function"
        fix = 'add command = "python my_agent.py" or function = "my_agent.py:run" to [task], and only one of them'
        raise RecipeError("task.command", what, because="an agent is one program", fix=fix)
    if options.function is not None:
        load_function(options.function, "task.function")
    else:
        _check_command(options.command or "")
    if options.sandbox and (options.function is not None or shutil.which("bwrap") is None):
        because = "a function runs in a process of Oncurve" if options.function is not None else "bubblewrap is not installed"
        fix = "use task.command" if options.function is not None else "install bubblewrap, or remove it"
        raise RecipeError("task.sandbox", "true", because=because, fix=fix)
    if options.port:
        _check_port(options.port)
    if not all(find_spec(package) for package in ("fastapi", "uvicorn")):
        because = "agents call an endpoint, which is an optional extra"
        raise MissingPackage("task.type", "fastapi or uvicorn is not installed", because=because, fix=pip_install("serve"))


def _check_port(port: int) -> None:
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
        except OSError as error:
            because = "another program listens there" if error.errno == errno.EADDRINUSE else str(error)
            raise RecipeError("task.port", port, because=because, fix="use another, or 0 for any free one") from None


def _check_command(command: str) -> None:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise RecipeError("task.command", command, because=str(error), fix="close the quotes") from None
    if not words or shutil.which(words[0]) is None:
        what = words[0] if words else "an empty text"
        because = f"there is no program '{what}' that can be run" if words else "it names no program"
        fix = "check its name and path; a script of yours needs its interpreter (python my_agent.py) or chmod +x and ./"
        raise RecipeError("task.command", command, because=because, fix=fix)
