"""The tool of agent-gsm8k.toml and agent-repair.toml: Python in the sandbox of the reward `code`, without network or files."""

from typing import Any

from oncurve.rewards.sandbox.sandbox import Limits, find_sandbox

LIMITS = Limits(seconds=2.0, memory=512 << 20, output=64 << 10)
NOTHING = "The code printed nothing."
MAX_TEXT = 400
"""Characters of a result. Everything that the model reads counts towards its max_new_tokens."""

# Like a notebook's cell: if the last line is an expression, its value is printed.
CELL = """
import ast
tree = ast.parse({code!r}, "<code>")
last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
names = {{"__name__": "__main__"}}
exec(compile(tree, "<code>", "exec"), names)
value = None if last is None else eval(compile(last, "<code>", "eval"), names)
if value is not None:
    print(repr(value))
"""


def run_python(code: str) -> str:
    """
    Run Python code and read what it prints. Every call starts anew, so the code must be complete.

    Args:
        code: The code. If its last line is an expression, the value of it is printed.

    Returns:
        What the code printed, or its error.
    """
    job = {"kind": "program", "program": CELL.format(code=code), "stdin": ""}
    outcome = find_sandbox("task.tools").run(job, LIMITS)
    printed, ended = shorten(outcome["output"].rstrip()), outcome["ended"]
    if ended == "exit 0":
        return printed or NOTHING
    if ended in ("time", "signal 9"):
        error = f"Error: the code took more than {LIMITS.seconds:g} seconds."
    elif ended == "output":
        error = "Error: the code printed too much."
    else:  # from the last place of the traceback on
        errors = outcome["errors"].strip()
        error = shorten(errors[max(0, errors.rfind('File "<code>"')) :]) or f"Error: the code ended with {ended}."
    return f"{printed}\n{error}".lstrip("\n")


def shorten(text: str) -> str:
    """The text, or its beginning and its end."""
    half = MAX_TEXT // 2
    return text if len(text) <= MAX_TEXT else f"{text[:half]} […] {text[-half:]}"


def called(completions: list[list[dict[str, Any]]]) -> list[float]:
    """1 for each conversation in which a call ran and printed something."""
    return [float(any(message["role"] == "tool" and is_value(message["content"]) for message in chat)) for chat in completions]


def is_value(result: str) -> bool:
    return bool(result) and not result.startswith(("{'error': ", "Error: ", 'File "<code>"', NOTHING))
