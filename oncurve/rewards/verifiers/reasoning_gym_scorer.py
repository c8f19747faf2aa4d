"""Scores one answer with reasoning-gym's own scorer. Runs as a program in the sandbox; reads a JSON job, prints a JSON score.

To a scorer an answer must be data, but several of the package's hand it to `eval` or to sympy's `parse_expr`, which is `eval`
too: code in it could choose the score. So both are replaced by parsers that read literals and formulas only, and an audit hook
refuses to run any other code that did not come from a file, whatever way a scorer takes to it. If a scorer raises, the answer
is wrong, unless it raises for the reference answer too: then the scorer itself is broken, and this program fails.
"""

from __future__ import annotations

import ast
import json
import operator
import sys
from typing import Any

import reasoning_gym
import sympy

FUNCTIONS = ("sin", "cos", "tan", "exp", "log", "ln", "sqrt", "asin", "acos", "atan", "sinh", "cosh", "tanh", "Abs")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def parse_formula(text: str, local_dict: dict[str, Any] | None = None, **_: Any) -> Any:
    """A formula as sympy's expression: numbers, names, + − * / ** and common functions. Replaces sympy's `parse_expr`."""
    return _build(ast.parse(text.strip().replace("^", "**"), mode="eval").body, local_dict or {})


def _build(node: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return sympy.Integer(node.value) if isinstance(node.value, int) else sympy.Float(node.value)
    if isinstance(node, ast.Name):
        return names.get(node.id) or {"pi": sympy.pi, "E": sympy.E}.get(node.id) or sympy.Symbol(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _build(node.operand, names)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_build(node.left, names), _build(node.right, names))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords:
        return getattr(sympy, node.func.id)(*(_build(part, names) for part in node.args))
    raise ValueError("not a formula")


def parse_literal(text: str, *_: Any) -> Any:
    """A list, number or text as Python writes it. Replaces `eval`."""
    return ast.literal_eval(text)


def replace_evaluation() -> None:
    """Replaces what evaluates text in every loaded module of the package; other code that is not from a file is refused."""
    evaluating = sympy.parse_expr
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "reasoning_gym":
            module.eval = parse_literal  # type: ignore[attr-defined]
            if getattr(module, "parse_expr", None) is evaluating:
                module.parse_expr = parse_formula  # type: ignore[attr-defined]
    sympy.parse_expr = parse_formula
    sys.addaudithook(_refuse_code)


def _refuse_code(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "exec" and arguments[0].co_filename.startswith("<") and not arguments[0].co_filename.startswith("<frozen "):
        raise PermissionError("an answer is data, not code")


def score(job: dict[str, Any]) -> float:
    data = reasoning_gym.create_dataset(job["family"], seed=job["seed"], **job["settings"])
    entry = data[job["index"]]
    replace_evaluation()
    try:
        return float(data.score_answer(job["answer"], entry))
    except Exception:
        data.score_answer(entry["answer"] or "", entry)  # raises if the scorer itself is broken
        return 0.0


if __name__ == "__main__":
    print(json.dumps({"score": score(json.loads(sys.stdin.read()))}))
