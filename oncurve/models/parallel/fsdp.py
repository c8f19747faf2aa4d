"""A policy whose weights are sharded over ranks by FSDP2 (torch's `fully_shard`): for models whose training state exceeds one
GPU.

Each rank holds a shard of every weight, in float32. For a pass of the learner, a layer's weights are gathered just before it
runs and freed after it. For sampling, all weights are gathered once (`full_weights`) in the compute precision, so the model
itself must fit next to a rank's shards; gradients, master weights and moments need not. If the model does not fit even so
(`scale.gather = false`), the sampler's passes gather layer by layer too, and ranks run them in lockstep (`in_lockstep`). The
model's own modules are used: the fast paths would move weights that FSDP2 manages.

With ``tensor`` > 1, neighbouring ranks split each layer (`oncurve.models.parallel.tensor_parallel`), and FSDP2 shards each part
over the ranks that hold the same part. The ranks of a tensor group run the same passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn import functional

from oncurve.errors import ModelError, OncurveError, ScaleError
from oncurve.models.attention_interface import AttentionContext
from oncurve.models.heads.lm_head import Truncate, Truncation
from oncurve.models.packing import Pack, dummy_pack
from oncurve.models.parallel.dtensor import Collective, is_dtensor, is_tensor_parallel, local_elements, range_at
from oncurve.models.parallel.tensor_parallel import REPLICATED, TensorGroup, gather_parts, tp_styles
from oncurve.models.policy import Policy


class ShardedPolicy(Policy):
    """The sharded form of ``policy``, which must not be used afterwards. Every forward pass is a collective of all ranks."""

    is_sharded = True
    fsdp_root: Any
    """FSDP2's root module: calling it runs a pass."""

    def __init__(
        self, policy: Policy, device: torch.device, collective: Collective, *, offload: bool, gather: bool, tensor: int
    ) -> None:
        self.__dict__.update(policy.__dict__)
        self._collective = collective
        self.layer_by_layer, self._is_lockstep = not gather, False
        self.fast_backbone = self.fused_weights = None
        self.compute_dtype, self._device = policy.model.dtype, device
        if policy.general_reason is not None:
            raise ModelError(
                type(policy.model).__name__,
                "can't be sharded by FSDP2",
                because=f"it takes the general path ({policy.general_reason}), whose passes do not run in lockstep",
                fix='use scale.shard = "optimiser"',
            )
        layers = getattr(self.backbone, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ModelError(
                type(policy.model).__name__,
                "can't be sharded by FSDP2",
                because="its backbone has no list of layers",
                fix='use scale.shard = "optimiser"',
            )
        group, styles = None, [dict[str, str]() for _ in layers]
        mesh = build_mesh(device, tensor)
        if tensor > 1:
            styles = tp_styles(policy, layers, tensor)
            mesh, group = mesh["data"], TensorGroup(mesh["tensor"], device, collective)
        policy.model.float()
        root = _ForwardPass(self)
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy(),
        }
        for layer, layer_styles in zip(layers, styles, strict=True):
            if group is not None:
                group.split(layer, layer_styles)
            fully_shard(layer, **options, reshard_after_forward=True)
            for name, style in layer_styles.items():
                for p in layer.get_submodule(name).parameters() if style == REPLICATED else ():
                    p.tensor_group = group  # type: ignore[attr-defined]
        self.fsdp_root = fully_shard(root, **options, reshard_after_forward=False)
        # By default FSDP2 prefetches in the order of all forward passes since the last backward, which differs between ranks
        # that sampled different numbers of tokens.
        for previous, layer in zip([layers[0], *layers], layers, strict=False):
            layer.set_modules_to_backward_prefetch([previous])  # type: ignore[operator]
        self.fsdp_root.set_modules_to_backward_prefetch([layers[-1]])
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)  # a loss is this rank's part of the step's loss: gradients are summed
            module.set_force_sum_reduction_for_comms(True)
        for p in policy.model.parameters():
            p.compute_dtype = self.compute_dtype
        with torch.no_grad():
            self.pack_logps(dummy_pack(device))  # FSDP2 makes the first module that is called the root

    @property
    def _modules(self) -> list[FSDPModule]:
        return [module for module in self.fsdp_root.modules() if isinstance(module, FSDPModule)]

    @property
    def device(self) -> torch.device:
        return self._device

    def pack_hidden(self, pack: Pack) -> Tensor:
        """The head stays gathered for the log-probs, until the backward pass has gone through the embedding."""
        with self._collective("forward through sharded weights"):
            hidden_MD: Tensor = self.fsdp_root(lambda: Policy.pack_hidden(self, pack))
        return hidden_MD

    def hidden(self, input_ids: Tensor, position_ids: Tensor, attention: AttentionContext) -> Tensor:
        if not self._is_lockstep:
            return super().hidden(input_ids, position_ids, attention)
        self._any_busy(True)
        return self._lockstep_forward(input_ids, position_ids, attention)

    def pack_logps(self, pack: Pack, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        logps = super().pack_logps(pack, temperature)
        if not torch.is_grad_enabled():
            self.fsdp_root.reshard()  # no backward pass will do it, and the weights may change before the next pass
        return logps

    def truncated_pack_logps(
        self, pack: Pack, temperature: float, log_mass_M: Tensor, truncate: Truncate
    ) -> tuple[Tensor, Truncation]:
        logps = super().truncated_pack_logps(pack, temperature, log_mass_M, truncate)
        self.fsdp_root.reshard()
        return logps

    @contextmanager
    def for_sampling(self) -> Iterator[None]:
        with self.in_lockstep() if self.layer_by_layer else self.full_weights():
            yield

    @contextmanager
    def in_lockstep(self) -> Iterator[None]:
        """Within this context ranks run the sampler's passes together. A rank that is done runs dummy passes until all are."""
        with self._collective("all-gather of embedding and head for sampling"):
            self.fsdp_root.unshard()
        self._is_lockstep = True
        try:
            yield
            self._run_dummy_passes()
        except ScaleError:
            raise
        except OncurveError:
            self._run_dummy_passes()
            raise
        finally:
            self._is_lockstep = False
            self.fsdp_root.reshard()

    @torch.no_grad()
    def _run_dummy_passes(self) -> None:
        pack = dummy_pack(self._device)
        while self._any_busy(False):
            self._lockstep_forward(pack.input_ids, pack.position_ids, pack.attention)

    def _any_busy(self, busy: bool) -> bool:
        """Whether any rank has a pass to run: an all-reduce before each pass."""
        count = torch.tensor(int(busy), device=self._device)
        with self._collective("agreeing on the next lockstep pass"):
            dist.all_reduce(count)
        return bool(count)

    def _lockstep_forward(self, input_ids: Tensor, position_ids: Tensor, attention: AttentionContext) -> Tensor:
        with self._collective("forward through sharded weights"):
            hidden: Tensor = self.fsdp_root(lambda: Policy.hidden(self, input_ids, position_ids, attention))
        return hidden

    @contextmanager
    def full_weights(self) -> Iterator[None]:
        modules = self._modules
        with self._collective("all-gather of weights for sampling"):
            for module in modules:
                module.set_reshard_after_forward(False, recurse=False)
                module.unshard()
            self._gather_tensor_parallel()
        try:
            yield
        finally:
            for module in modules:
                module.set_reshard_after_forward(module is not self.fsdp_root, recurse=False)
                module.reshard()

    @torch.no_grad()
    def _gather_tensor_parallel(self) -> None:
        """Replace tensor-parallel parts by full weights, until FSDP2 restores its shards."""
        for module in self.model.modules():
            for name, p in module.named_parameters(recurse=False):
                if is_dtensor(p):
                    module._parameters[name] = nn.Parameter(gather_parts(p), requires_grad=False)

    def full_state_dict(self, keep: bool) -> dict[str, Tensor]:
        """Gathers one weight at a time, so that a GPU needs room for the largest only."""
        weights = {}
        for name, p in self.model.named_parameters():
            with self._collective("all-gather of weights to save"):
                full = gather_full_tensor(p, self._device)
            if keep:
                weights[name] = full.to("cpu", self.compute_dtype)
        return weights


def build_mesh(device: torch.device, tensor: int) -> DeviceMesh:
    """All ranks as a mesh: (data,), or (data, tensor) for tensor groups of several ranks. If the world exchanges by gloo, so do
    its groups: some versions of torch take NCCL if there is a GPU, and NCCL refuses ranks that share one."""
    names = ("data", "tensor")[: 1 if tensor == 1 else 2]
    shape = (dist.get_world_size() // tensor, tensor)[: len(names)]
    backends: Any = dict.fromkeys(names, "gloo") if dist.get_backend() == "gloo" else None
    return init_device_mesh(device.type, shape, mesh_dim_names=names, backend_override=backends)


@torch.no_grad()
def gather_full_tensor(shard: Any, device: torch.device) -> Tensor:
    """The full tensor on every rank, by all-gather of its shards. DTensor's own `full_tensor` uses a collective that gloo does
    not have for a GPU's tensors: the process crashes."""
    mesh = shard.device_mesh
    ranges = [range_at(shard, coordinate) for coordinate in product(*map(range, mesh.shape))]
    full = torch.empty(shard.shape, dtype=shard.dtype, device=device)
    sizes = [part_range.within(full).numel() for part_range in ranges]
    local = local_elements(shard).to(device)
    local = functional.pad(local, (0, max(sizes) - local.numel()))
    parts = local.new_empty(len(ranges), len(local))
    dist.all_gather_into_tensor(parts.view(-1), local, None if is_tensor_parallel(shard) else mesh.get_group())
    for part_range, part, size in zip(ranges, parts, sizes, strict=True):
        part_range.fill(full, part[:size])
    return full


class _ForwardPass(nn.Module):
    """A pass through the backbone as one module: embedding and head stay gathered during it, layers one at a time."""

    def __init__(self, policy: ShardedPolicy) -> None:
        super().__init__()
        self.model = policy.model

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        return run()
