"""User errors around a cluster: one message with its fix, exit code 2, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import oncurve
from oncurve.recipe.load import dump_recipe
from oncurve.recipe.schema.recipe import Recipe
from tests.cluster.conftest import SMALL
from tests.faults.cases import FORMAT, GRPO, recipe

RUN = recipe({**GRPO, "steps": 2}, rewards=[FORMAT], scale={"samplers": 2})
AS_INSTALLED = "import sys; from oncurve.cli.app import main; sys.exit(main())"


def refused(tmp_path: Path, of: Recipe, address: str, *, before: str = "", **environment: str) -> str:
    """The message with its white space collapsed, as lines are wrapped. Checks that no run was left behind."""
    file = tmp_path / "recipe.toml"
    file.write_text(dump_recipe(of))
    command = [
        sys.executable,
        "-c",
        before + AS_INSTALLED,
        "train",
        str(file),
        "--out",
        str(tmp_path / "run"),
        "--ray",
        address,
    ]
    environ = {**os.environ, "TERM": "dumb", **environment}
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=400, check=False)
    message = " ".join((ended.stdout + ended.stderr).split())
    assert ended.returncode == 2, message
    assert "Traceback" not in message
    assert not (tmp_path / "run").exists()
    return message


def test_an_address_without_a_server(tmp_path: Path) -> None:
    message = refused(tmp_path, RUN, "127.0.0.1:9")
    assert "no Ray cluster answers" in message
    assert "ray start --head" in message


@pytest.mark.slow
def test_an_address_that_accepts_a_connection_but_never_answers(tmp_path: Path) -> None:
    """Ray itself would wait for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        message = refused(tmp_path, RUN, f"127.0.0.1:{deaf.getsockname()[1]}")
    assert "no answer within 8 s" in message


def test_the_address_of_a_ray_client(tmp_path: Path) -> None:
    assert "use --ray auto" in refused(tmp_path, RUN, "ray://127.0.0.1:10001")


def test_an_address_without_a_port(tmp_path: Path) -> None:
    assert "an address is HOST:PORT" in refused(tmp_path, RUN, "localhost")


@pytest.mark.slow
def test_a_machine_whose_cluster_is_gone(tmp_path: Path) -> None:
    """`auto` uses Ray's environment variable."""
    assert "no Ray cluster answers" in refused(tmp_path, RUN, "auto", RAY_ADDRESS="127.0.0.1:9")


def test_ray_is_not_installed(tmp_path: Path) -> None:
    message = refused(tmp_path, RUN, "auto", before="import sys; sys.modules['ray'] = None; ")
    assert "Ray is not installed" in message
    assert "pip install 'oncurve[ray]'" in message


def test_ray_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "old" / "ray"
    old.mkdir(parents=True)
    (old / "__init__.py").write_text("__version__ = '2.9.3'\n")
    message = refused(tmp_path, RUN, "auto", PYTHONPATH=str(tmp_path / "old"))
    assert "Ray 2.9.3 is too old" in message
    assert "ray>=2.50" in message


@pytest.mark.slow
def test_more_than_the_cluster_has(cluster: Any, tmp_path: Path) -> None:
    many = RUN.model_copy(update={"scale": RUN.scale.model_copy(update={"samplers": 40})})
    message = refused(tmp_path, many, cluster.address)
    assert "40 samplers" in message
    assert "need 41 CPU" in message
    assert "4 nodes have 6 CPU" in message


@pytest.mark.slow
def test_vllm_is_missing_on_the_nodes(cluster: Any, tmp_path: Path) -> None:
    with_vllm = RUN.model_copy(update={"scale": RUN.scale.model_copy(update={"engine": "vllm"})})
    message = refused(tmp_path, with_vllm, cluster.address)
    assert "vLLM is not installed" in message
    assert "native" in message


@pytest.mark.slow
def test_other_code_on_a_node(cluster: Any, tmp_path: Path) -> None:
    """A node whose Oncurve differs in one file is refused before any actor starts."""
    assert oncurve.__file__ is not None
    shutil.copytree(Path(oncurve.__file__).parent, tmp_path / "other" / "oncurve")
    with (tmp_path / "other" / "oncurve" / "records.py").open("a") as file:
        file.write("\nCHANGED = True\n")
    node = cluster.add_node(**SMALL, env_vars={"PYTHONPATH": str(tmp_path / "other")})
    try:
        message = refused(tmp_path, RUN, cluster.address)
    finally:
        cluster.remove_node(node)
    assert "Oncurve's code differs from this machine's" in message
    assert node.unique_id is not None
    assert "install the same version there" in message


@pytest.mark.slow
def test_a_stage_without_correction_is_not_run_asynchronously(cluster: Any, tmp_path: Path) -> None:
    plain = {key: value for key, value in GRPO.items() if key != "optimiser"}
    run = recipe({**plain, "type": "trpo"}, rewards=[FORMAT], scale={"samplers": 1, "max_staleness": 1})
    assert "no correction" in refused(tmp_path, run, cluster.address)
