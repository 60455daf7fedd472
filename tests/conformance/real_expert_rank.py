"""One rank of a real step with expert parallelism, with the collectives that it asks for.

The decoder of a language model as trioflow builds it, each rank with its own experts, tokens handed
over by PyTorch's functional all-to-alls as torchtitan's ``ExpertParallel`` does, ``fully_shard``
applied to experts and blocks as torchtitan applies it. Routing is forced to be balanced.

Started as ``python real_expert_rank.py JOB RANK``; writes ``found-RANK.json`` beside the job.
"""

import json
import os
import sys
from contextlib import nullcontext
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from trioflow.trace.language.decoder import Experts, GroupedLinear, Kernels, LanguageNetwork
from trioflow.trace.language.sizes import LanguageModel

WHOLE = {"_allgather_base_": 0, "_reduce_scatter_base_": 1, "all_to_all_single": 0}
"""Collectives by their call, and which argument is the whole buffer."""
CALLED = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}


class Asked(TorchDispatchMode):
    """Notes the collectives of several ranks that a rank asks for: name, bytes, group."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int, list[int]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        called = function._opname
        if called in WHOLE:
            names = [argument.name for argument in function._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            if "process_group" in given:
                group = dist.ProcessGroup.unbox(given["process_group"])
            else:
                group = dist.distributed_c10d._resolve_process_group(given["group_name"])
            ranks = dist.get_process_group_ranks(group)
            whole = args[WHOLE[called]]
            if len(ranks) > 1:
                size = prod(whole.shape) * whole.element_size()
                self.found.append((CALLED.get(called, called), size, ranks))
        return function(*args, **(kwargs or {}))


def multiply(module: GroupedLinear, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Do what a grouped product does, expert by expert."""
    begins = [0, *ends.tolist()]
    parts = [rows[a:b] @ w for a, b, w in zip(begins, begins[1:], module.weight, strict=False)]
    return torch.cat(parts)


def exchange(module: Experts, group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    """Transform tokens by experts of which each rank has a part."""
    tokens, sizes = x.flatten(0, 1), module.sizes
    scores = F.softmax(module.gate(tokens), dim=-1, dtype=torch.float32)
    chosen = torch.arange(len(tokens) * sizes.experts_per_token) % sizes.experts
    weights = scores.gather(1, chosen.view(len(tokens), -1))
    weights = weights / weights.sum(dim=-1, keepdim=True)
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=sizes.experts)
    source = order // sizes.experts_per_token
    rows = tokens.index_select(0, source)
    arriving = all_to_all_single(counts, None, None, group).view(group.size(), -1)
    leaves, arrives = counts.view(group.size(), -1).sum(1).tolist(), arriving.sum(1).tolist()
    rows = all_to_all_single_autograd(rows, arrives, leaves, group)
    experts = torch.arange(arriving.shape[1]).repeat(group.size())
    sorting = experts.repeat_interleave(arriving.flatten()).argsort(stable=True)
    ends = arriving.sum(0).cumsum(0)
    rows = rows.index_select(0, sorting)
    inside = module.activate(module.gate_proj(rows, ends)) * module.up_proj(rows, ends)
    made = module.down_proj(inside, ends)
    made = torch.zeros_like(made).index_copy(0, sorting, made)
    made = all_to_all_single_autograd(made, leaves, arrives, group)
    made = made * weights.flatten().index_select(0, order).unsqueeze(1).to(made.dtype)
    out = torch.zeros_like(tokens).index_add(0, source, made).view_as(x)
    return out + module.shared(x) if sizes.shared_feed_forward else out


def share_experts(model: LanguageNetwork, mesh) -> None:
    """Leave this rank its experts, and shard them, then each block, then the rest."""
    group, place = mesh["expert"].get_group(), mesh["expert"].get_local_rank()
    for layer in model.model.layers:
        grouped = [m for m in layer.mlp.children() if isinstance(m, GroupedLinear)]
        for module in grouped:
            mine = module.weight.detach().chunk(group.size())[place].clone()
            module.weight = torch.nn.Parameter(mine)
            module.forward = multiply.__get__(module)
        layer.mlp.forward = lambda x, mlp=layer.mlp: exchange(mlp, group, x)
        fully_shard(grouped, mesh=mesh["replica"], shard_placement_fn=lambda _: Shard(1))
        fully_shard(layer, mesh=mesh["replica", "expert"]._flatten())
    fully_shard(model, mesh=mesh["replica", "expert"]._flatten(), reshard_after_forward=False)


def main() -> None:
    job_path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job, folder = json.loads(job_path.read_text()), job_path.parent
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), job["ranks"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job["ranks"])
    torch.manual_seed(0)
    result = {}
    for expert in job["expert"]:
        mesh = init_device_mesh("cpu", (job["ranks"] // expert, expert), mesh_dim_names=("replica", "expert"))
        network = LanguageNetwork(LanguageModel(**job["model"]), job["sequence"], Kernels("flash", "eager", "eager"))
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        model = network.bfloat16()
        share_experts(model, mesh)
        tokens = torch.randint(job["model"]["vocabulary"], (job["batch"], job["sequence"]))
        asked = Asked()
        for mode in (nullcontext(), asked):  # the first makes what is made lazily
            with mode:
                loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
                loss.backward()
        result[str(expert)] = asked.found
    (folder / f"found-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
