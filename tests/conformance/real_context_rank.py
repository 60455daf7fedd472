"""One rank of a real step in which ranks share sequences; records what PyTorch's context parallelism sends.

Started as ``python real_context_rank.py JOB RANK``; writes ``found-RANK.json`` beside the job. PyTorch registers its
ring for attention kernels of GPUs alone: here its own loop runs with the processor's kernel.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather
from trioflow.trace.workloads import build

ATTEND = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
DIFFERENTIATE = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
CALLED = {"permute_tensor": "shift", "all_gather_single": "all_gather", "reduce_scatter_single": "reduce_scatter"}
"""PyTorch's functions, and what each is called here."""


def attend(query, key, value, is_causal, **_):
    """Attend to a block; results and logarithms of sums."""
    return ATTEND(query, key, value, 0.0, bool(is_causal))


def differentiate(query, key, value, out, logsumexp, is_causal, grad_out, **_):
    """Return the gradients of a block."""
    return DIFFERENTIATE(
        grad_out.contiguous(),
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        out.contiguous(),
        logsumexp,
        0.0,
        bool(is_causal),
    )


class Ring(torch.autograd.Function):
    """Attention by PyTorch's ring, and its gradient."""

    @staticmethod
    def forward(context, query, key, value):
        out, sums, *_ = _attention._templated_ring_attention(
            dist.group.WORLD, 2, attend, query, key, value, is_causal=True
        )
        context.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(context, gradient):
        return _attention._templated_ring_attention_backward(
            dist.group.WORLD, 2, differentiate, gradient, "grad_out", *context.saved_tensors, is_causal=True
        )[:3]


def attend_by_ring(query, key, value, is_causal):
    """Stand in for PyTorch's attention."""
    return Ring.apply(query, key, value)


def attend_to_gathered(query, key, value, is_causal):
    """Attend to all keys, as PyTorch's context parallelism of flexible attention gathers them."""
    key, value = flex_cp_allgather(key, value, 2, dist.group.WORLD.group_name)
    return ATTENTION(query, key, value)


ATTENTION = torch.nn.functional.scaled_dot_product_attention
WAYS = {"ring": attend_by_ring, "all-gather": attend_to_gathered}


class Messages:
    """Notes the collectives that PyTorch's code asks for: name, bytes and ranks."""

    def __init__(self) -> None:
        self.asked: list[list] = []
        for name in CALLED:
            setattr(functional, name, self.note(name, getattr(functional, name)))

    def note(self, name, function):
        """Return a function that notes its call."""

        def call(tensor, *given, **named):
            size = tensor.numel() * tensor.element_size()
            if name == "all_gather_single":
                size *= dist.get_world_size()
            if name == "permute_tensor":
                ranks = dist.get_world_size()
                assert given[0] == [(rank + 1) % ranks for rank in range(ranks)]
            self.asked.append([CALLED[name], size, list(range(dist.get_world_size()))])
            return function(tensor, *given, **named)

        return call


def main() -> None:
    job_path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job, folder = json.loads(job_path.read_text()), job_path.parent
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), job["ranks"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job["ranks"])
    _attention._cp_options.rotate_method = _attention._RotateMethod.ALL_TO_ALL
    workload = build.build_workload(job["row"])
    inputs, targets = workload.make_batch(job["batch"], 0)
    chunks = [part.chunk(2 * job["ranks"], dim=1) for part in (inputs, targets)]
    tokens, wanted = (torch.cat([p[rank], p[-1 - rank]], dim=1) for p in chunks)
    messages, found = Messages(), {}
    for method, way in WAYS.items():
        messages.asked = []
        torch.nn.functional.scaled_dot_product_attention = way
        workload.loss(workload.model(tokens), wanted).backward()
        found[method] = messages.asked
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # functional collectives warn about themselves at a normal end


if __name__ == "__main__":
    main()
