"""QLoRA on a GPU: bitsandbytes' own kernels, the gradient beside the same numbers written out, and what a base then takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oncurve.models import lora
from oncurve.models.load import load_policy
from oncurve.models.packing import Bundle, Pack, build_pack
from oncurve.models.policy import Policy
from oncurve.recipe.sections import Model, TinyModel

pytestmark = pytest.mark.gpu
WIDE = TinyModel(layers=4, width=512, heads=8, kv_heads=4, head_size=64, mlp_width=2048, context=128)
NEAR = {"nf4": 0.03, "int8": 0.06}
"""Products are taken in bfloat16, and 8-bit ones round their inputs too."""


def pack() -> Pack:
    ids = torch.arange(2, 14).numpy()
    return build_pack([Bundle(ids[:5], (ids[5:], ids[7:]), (0, 1))], torch.device("cuda"))


def gradient(policy: Policy) -> torch.Tensor:
    policy.model.zero_grad()
    policy.pack_logps(pack())[0].sum().backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.float().flatten() for p in lora.trained(policy.model).values() if p.grad is not None])


@pytest.mark.parametrize("kind", list(NEAR))
def test_the_gradient_is_that_of_the_same_numbers_written_out(kind: str, tmp_path: Path) -> None:
    load_policy(Model(tiny=WIDE, device="cpu"), alphabet="0123456789+=", seed=0).save(tmp_path / "base")
    told = {"source": str(tmp_path / "base"), "dtype": "bfloat16", "device": "cuda"}
    before = torch.cuda.memory_allocated()
    policy = load_policy(Model.model_validate({**told, "quantise": kind, "lora": {"rank": 4}}), alphabet=None, seed=0)
    small = torch.cuda.memory_allocated() - before
    policy.save(tmp_path / "written")
    shake(policy)
    before = torch.cuda.memory_allocated()
    config = Model.model_validate({**told, "source": str(tmp_path / "written"), "lora": {"rank": 4}})
    plain = load_policy(config, alphabet=None, seed=0)
    assert small < (torch.cuda.memory_allocated() - before) * {"nf4": 0.5, "int8": 0.75}[kind]
    with torch.no_grad():
        adapter = lora.trained(policy.model)
        for name, p in lora.trained(plain.model).items():
            p.copy_(adapter[name])
    mine, wanted = gradient(policy), gradient(plain)
    assert mine.shape == wanted.shape
    assert float((mine - wanted).norm() / wanted.norm()) < NEAR[kind]


def shake(policy: Policy) -> None:
    """An adapter that means something."""
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in lora.trained(policy.model).values():
            p.add_((torch.randn(p.shape, generator=dice) * 0.1).to(p))
