"""GPUs by any spelling of their names, and by the driver's names."""

from __future__ import annotations

import pytest

from oncurve.errors import RecipeError
from oncurve.plan.hardware import GIB, GPUS, find_gpu, gpu_of_driver
from oncurve.plan.step_time import Rates


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("H200", "H200"),
        ("h100", "H100-80GB"),
        ("H100-80GB", "H100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H200", "H200"),
        ("a100 80gb", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("rtx-4090", "RTX4090"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_gpu_by_any_of_its_names(name: str, key: str) -> None:
    assert find_gpu(name) is GPUS[key]


def test_memory_decides_between_gpus_of_one_name() -> None:
    assert gpu_of_driver("NVIDIA A100", 80 * GIB) is GPUS["A100-80GB"]
    assert gpu_of_driver("NVIDIA A100", 40 * GIB) is GPUS["A100-40GB"]


def test_the_error_for_an_unknown_gpu_names_the_closest_ones() -> None:
    with pytest.raises(RecipeError) as error:
        find_gpu("H10")
    assert "H100-80GB" in error.value.fix
    assert gpu_of_driver("Voodoo 2") is None


def test_the_cpu_is_this_machine() -> None:
    cpu = find_gpu("cpu")
    assert cpu.is_cpu
    assert cpu.memory > GIB


def test_the_rates_reached_on_an_h200_are_the_measured_ones() -> None:
    rates = Rates(GPUS["H200"])
    assert rates.flops == pytest.approx(790e12, rel=0.01)
    assert rates.bytes == pytest.approx(4.3e12, rel=0.01)
