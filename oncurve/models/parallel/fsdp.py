"""A policy whose weights are shared out over ranks by FSDP2 (torch's `fully_shard`): for models that no GPU holds with all that
training needs.

Each rank keeps a part of every weight, in float32. For a pass of the learner a layer's weights are gathered just before its
turn and dropped after it; for sampling all are gathered once (`gathered`), in the precision that the model computes in, so the
model itself must fit beside a rank's shards, and gradients, masters and moments need not. Where not even the model fits
(`scale.gather = false`), each pass of the sampler gathers layer by layer too, and ranks go through the model in step
(`in_turns`). The model goes through its own modules: fast paths move weights about, and here they lie where FSDP2 wants them.

With ``tensor`` > 1, neighbouring ranks split each layer between them (`oncurve.models.parallel.tensor_parallel`), and FSDP2
shards the parts over the ranks that have the same part. The ranks of such a group make the same passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn import functional

from oncurve.errors import ModelError, OncurveError, ScaleError
from oncurve.models.attention_interface import AttentionContext
from oncurve.models.packing import Pack, dummy_pack
from oncurve.models.parallel.dtensor import Collective, is_shard, is_sharded, local_elements, range_at
from oncurve.models.parallel.tensor_parallel import PARTIAL, TensorGroup, tp_styles
from oncurve.models.policy import Policy


class ShardedPolicy(Policy):
    """The same model as ``policy``, which is used up. Every pass is an exchange that all ranks take part in."""

    passes: Any
    """The module that FSDP2 has taken over."""

    def __init__(
        self, policy: Policy, device: torch.device, exchange: Collective, *, offload: bool, gather: bool, tensor: int
    ) -> None:
        self.__dict__.update(policy.__dict__)
        self._exchange = exchange
        self.layer_by_layer, self._in_turns = not gather, False
        self.fast_backbone = None
        self.compute_dtype, self._device = policy.model.dtype, device
        layers = getattr(self.backbone, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ModelError(
                type(policy.model).__name__,
                "can't be shared out over ranks",
                because="its layers do not lie in a list, where FSDP2 could take them one by one",
                fix='use scale.shard = "optimiser"',
            )
        together, styles = None, [dict[str, str]() for _ in layers]
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        if tensor > 1:
            styles = tp_styles(policy, layers, tensor)
            both = init_device_mesh(device.type, (dist.get_world_size() // tensor, tensor), mesh_dim_names=("data", "tensor"))
            mesh, together = both["data"], TensorGroup(both["tensor"], device, exchange)
        policy.model.float()
        whole = _Pass(self)
        how: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy(),
        }
        for layer, of_layer in zip(layers, styles, strict=True):
            if together is not None:
                together.split(layer, of_layer)
            fully_shard(layer, **how, reshard_after_forward=True)
            for name, style in of_layer.items():
                for p in layer.get_submodule(name).parameters() if style == PARTIAL else ():
                    p.partial_over = together  # type: ignore[attr-defined]
        self.passes = fully_shard(whole, **how, reshard_after_forward=False)
        # By itself FSDP2 fetches ahead what came before in all passes since the last one back. Ranks that sampled nothing, or
        # other numbers of tokens, would not fetch alike.
        for before, layer in zip([layers[0], *layers], layers, strict=False):
            layer.set_modules_to_backward_prefetch([before])  # type: ignore[operator]
        self.passes.set_modules_to_backward_prefetch([layers[-1]])
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)  # our losses are shares of the step's: gradients are summed
            module.set_force_sum_reduction_for_comms(True)
        for p in policy.model.parameters():
            p.compute_dtype = self.compute_dtype
        with torch.no_grad():
            self.pack_logps(dummy_pack(device))  # FSDP2 takes the first module that is called for the root

    @property
    def _modules(self) -> list[FSDPModule]:
        return [module for module in self.passes.modules() if isinstance(module, FSDPModule)]

    @property
    def device(self) -> torch.device:
        return self._device

    def pack_hidden(self, pack: Pack) -> Tensor:
        """The head stays gathered for what follows, until the backward pass has gone through the embedding."""
        with self._exchange("a pass through shared-out weights"):
            hidden_MD: Tensor = self.passes(lambda: Policy.pack_hidden(self, pack))
        return hidden_MD

    def hidden(self, input_ids: Tensor, position_ids: Tensor, layout: AttentionContext) -> Tensor:
        if not self._in_turns:
            return super().hidden(input_ids, position_ids, layout)
        self._any_busy(True)
        return self._turn(input_ids, position_ids, layout)

    def pack_logps(self, pack: Pack, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        found = super().pack_logps(pack, temperature)
        if not torch.is_grad_enabled():
            self.passes.reshard()  # no backward pass will: and weights may be others by the next
        return found

    @contextmanager
    def for_sampling(self) -> Iterator[None]:
        with self.in_turns() if self.layer_by_layer else self.full_weights():
            yield

    @contextmanager
    def in_turns(self) -> Iterator[None]:
        """Within, ranks sample by passes that all of them make at once: whoever is done goes along until nobody is busy."""
        with self._exchange("gathering both ends of the model for sampling"):
            self.passes.unshard()
        self._in_turns = True
        try:
            yield
            self._go_along()
        except ScaleError:
            raise
        except OncurveError:
            self._go_along()
            raise
        finally:
            self._in_turns = False
            self.passes.reshard()

    @torch.no_grad()
    def _go_along(self) -> None:
        blank = dummy_pack(self._device)
        while self._any_busy(False):
            self._turn(blank.input_ids, blank.position_ids, blank.attention)

    def _any_busy(self, busy: bool) -> bool:
        """Whether any rank has a pass to make, asked before each."""
        count = torch.tensor(int(busy), device=self._device)
        with self._exchange("taking turns through shared-out weights"):
            dist.all_reduce(count)
        return bool(count)

    def _turn(self, input_ids: Tensor, position_ids: Tensor, layout: AttentionContext) -> Tensor:
        with self._exchange("a pass through shared-out weights"):
            hidden: Tensor = self.passes(lambda: Policy.hidden(self, input_ids, position_ids, layout))
        return hidden

    @contextmanager
    def full_weights(self) -> Iterator[None]:
        modules = self._modules
        with self._exchange("gathering weights for sampling"):
            for module in modules:
                module.set_reshard_after_forward(False, recurse=False)
                module.unshard()
            self._join_split()
        try:
            yield
        finally:
            for module in modules:
                module.set_reshard_after_forward(module is not self.passes, recurse=False)
                module.reshard()

    @torch.no_grad()
    def _join_split(self) -> None:
        """What ranks have split becomes whole on each, until FSDP2 puts its shards back."""
        for module in self.model.modules():
            for name, p in module.named_parameters(recurse=False):
                if is_shard(p):
                    part: Any = p
                    module._parameters[name] = nn.Parameter(part.full_tensor(), requires_grad=False)

    def weights_to_save(self, keep: bool) -> dict[str, Tensor]:
        """One after the other, so that no GPU needs room for more than the largest."""
        found = {}
        for name, p in self.model.named_parameters():
            with self._exchange("gathering weights to save them"):
                whole = gather_full_weights(p, self._device)
            if keep:
                found[name] = whole.to("cpu", self.compute_dtype)
        return found


@torch.no_grad()
def gather_full_weights(shard: Any, device: torch.device) -> Tensor:
    """A tensor of all ranks' shards of it, which each sends to all."""
    if not is_sharded(shard):
        whole: Tensor = shard.detach().to(device).full_tensor()
        return whole
    mesh = shard.device_mesh
    ranges = [range_at(shard, (data, part)) for data in range(mesh.size(0)) for part in range(mesh.size(1))]
    whole = torch.empty(shard.shape, dtype=shard.dtype, device=device)
    sizes = [at.within(whole).numel() for at in ranges]
    own = functional.pad(local_elements(shard).to(device), (0, max(sizes) - local_elements(shard).numel()))
    parts = [torch.empty_like(own) for _ in ranges]
    dist.all_gather(parts, own)
    for at, part, size in zip(ranges, parts, sizes, strict=True):
        at.fill(whole, part[:size])
    return whole


class _Pass(nn.Module):
    """A pass through the backbone as one module: both ends are gathered for its length, and each layer for its turn."""

    def __init__(self, policy: ShardedPolicy) -> None:
        super().__init__()
        self.model = policy.model

    def forward(self, through_backbone: Callable[[], Tensor]) -> Tensor:
        return through_backbone()
