"""Arguments that several commands share: what to run, under which plan, on which platform."""

from __future__ import annotations

import argparse

from trioflow.base.plan_row import (
    CONTEXT_METHODS,
    OFFLOADS,
    RECOMPUTATIONS,
    SCHEDULES,
    SEVERAL_STAGES,
    SHARDINGS,
    TENSOR_OVERLAPS,
    TENSOR_STYLES,
)
from trioflow.base.precision_recipes import DEFAULT_RECIPE, RECIPE_NAMES
from trioflow.base.settings import OPTIMIZERS
from trioflow.cli.text import add_options
from trioflow.costmodel.operators.methods import UNFITTED
from trioflow.costmodel.steps import TIMER
from trioflow.parallel.plan import NAMED
from trioflow.parallel.schedules.table import MODES
from trioflow.parallel.splits.pipeline import BALANCES
from trioflow.parallel.splits.routing import BALANCED
from trioflow.prediction.options import ANCHORS, CLOSED_FORM, SESSION
from trioflow.trace.language.sizes import ATTENTIONS, FUSIONS, LOSSES


def add_plan_arguments(parser: argparse.ArgumentParser, *, megatron: bool = False) -> None:
    """Add what a task graph is made from; with ``megatron`` its file may stand for a trace."""
    parser.add_argument(
        "trace", metavar="TRACE", nargs="*" if megatron else "+",
        help="folder or pack of a trace, a shipped one's name, or a language model by its name (llama-3.1-8b) or its "
        "configuration's file; more of the same workload at other batches make other batches more certain",
    )  # fmt: skip
    add_model_arguments(parser)
    add_options(parser, (
        ("--platform", "NAME|FILE", "shipped platform, this-machine (after `make reproduce`), or a YAML file", {"required": True}),
        ("--batch", (int, "N"), "samples of the whole step, all ranks together"),
        ("--plan", "NAME", f"plan by name, on --ranks ranks: {', '.join(NAMED)}, or one that a package registers"),
        ("--ranks", (int, "N"), "number of ranks"),
    ))  # fmt: skip
    _add_degrees(parser)
    _add_pipeline(parser)
    add_options(parser, (
        ("--mode", MODES, f"what of the step runs (default: {MODES[0]})", {"default": MODES[0]}),
        ("--last-batch", True, "the batch is what is left of a data set: replicas that cannot share it evenly repeat samples"),
        ("--cost-model", "MODEL", "operator model of `trioflow fit`, a shipped one by name, or "
         f"{' or '.join(UNFITTED)} (a baseline)"),
        ("--anchor", ANCHORS, "operators that were timed one by one, and a measured step: take the timer off each, use one factor "
         f"(ratio), or leave them (none); {SESSION}: to the single-rank steps of the session that measured the "
         f"workload here (default: {TIMER})", {"default": TIMER}),
        ("--session", "FILE", "session.json of --anchor session (default: the workload's, measured by `make reproduce` in this folder)"),
        ("--override", "CSV", "operator times from elsewhere, at the trace's sizes: columns name, time_us and, where "
         "needed, phase and input_shapes"),
    ))  # fmt: skip


def add_model_arguments(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add what is asked of a language model by its name or configuration, of ``several`` recipes at once."""
    model = parser.add_argument_group("of a language model given by its name or configuration")
    model.add_argument("--sequence", type=int, metavar="N", help="tokens of a sample")
    model.add_argument(
        "--precision", metavar="RECIPE[+FUSION][,RECIPE...]" if several else "RECIPE",
        help=f"what is held and computed in which format: {', '.join(RECIPE_NAMES)} (default: {DEFAULT_RECIPE})"
        + ("; plans of several are ranked together, each with the fusion behind its plus sign" if several else ""),
    )  # fmt: skip
    add_options(model, (
        ("--attention", ATTENTIONS, "attention's kernel: what PyTorch's operator runs (flash: FlashAttention 2, cuDNN's on Blackwell), a version of FlashAttention, cuDNN's, "
         "or one that keeps the scores (default: cudnn for Megatron's recipes, flash2 for nanotron's, else flash)"),
        ("--fusion", FUSIONS, "what runs as one kernel: nothing that PyTorch runs alone (eager), what torch.compile, Liger or flash-attn "
         "fuse, Megatron Core's layers, besides products that add to main gradients (default: as the recipe's framework)"),
        ("--loss", LOSSES, "cross-entropy: of scores cast to fp32 (eager), one kernel each way (fused), or with the head's product a piece at "
         "a time (chunked; default: as --fusion fuses it)"),
        ("--optimizer", OPTIMIZERS, "one kernel for all parameters (-fused, default adamw-fused), a pass for each term over all of them "
         "(-foreach), or parameter by parameter"),
    ))  # fmt: skip
    model.add_argument(
        "--cuda-graphs", action="store_const", const=True,
        help="the host launches a block's forward, and its backward, as one CUDA graph each",
    )  # fmt: skip
    model.add_argument(
        "--deterministic", action="store_const", const=True,
        help="attention adds its gradients in a fixed order, which makes its backward slower",
    )  # fmt: skip
    add_options(model, (
        ("--freeze", "PATTERN[,PATTERN...]", "parameters or modules that do not train, such as 'model.embed_tokens' or '*.mlp'"),
        ("--lora", (int, "R"), "freeze all and train adapters of rank R beside linear layers, as PEFT's LoRA"),
        ("--lora-targets", "NAME[,NAME...]", "these layers: q,k,v,o,gate,up,down or all-linear (default: PEFT's, q and v)"),
        ("--lora-dropout", (float, "SHARE"), "what adapters drop of what they read (default: 0)"),
    ))  # fmt: skip


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a run of many steps is asked by: tokens, price, power."""
    add_options(parser, (
        ("--tokens", (float, "N"), "tokens of a whole run, to say its days, cost and energy"),
        ("--price-per-gpu-hour", (float, "P"), "price of a GPU, to say what it costs"),
        ("--power-w", (float, "W"), "power of a GPU while it trains, to say the energy [W] (default of a run: its sheet's limit)"),
    ))  # fmt: skip


def add_fault_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what stops a run of --tokens."""
    faults = parser.add_argument_group("failures of a run of --tokens")
    add_options(faults, (
        ("--gpu-hours-per-failure", (float, "H"), "GPU-hours between failures that stop the run, to say what is lost and how often to save"),
        ("--checkpoint-s", (float, "S"), "time in which the run waits for its state to be saved [s] (default: 0)", {"default": 0.0}),
        ("--restart-s", (float, "S"), "from a failure to the first step after it [s] (default: 0)", {"default": 0.0}),
    ))  # fmt: skip


def add_what_if_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what may be faster or slower than predicted."""
    supposed = parser.add_argument_group("what if (each factor but the network's is on a time)")
    supposed.add_argument(
        "--scale-network", type=float, metavar="F", help="the network were F times as fast"
    )
    supposed.add_argument(
        "--scale-operator", nargs=2, action="append", default=[], metavar=("NAME", "F"),
        help="operators took F times as long: a name, or a pattern such as '*attention*'; may come several times",
    )  # fmt: skip
    supposed.add_argument(
        "--slow-rank", nargs=2, action="append", default=[], metavar=("RANK", "F"),
        help="a rank computed F times as long; may come several times",
    )  # fmt: skip
    add_routing_argument(supposed)


def add_routing_argument(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add how a router spreads tokens over experts."""
    parser.add_argument(
        "--routing", metavar="HOW", default=BALANCED,
        help="how tokens are spread over experts: balanced (default), consecutive (gates of benchmarks), power:EXPONENT (a bound, drawn by --seed), or a file of each expert's share",
    )  # fmt: skip


def add_draw_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what asks for the spread of a step."""
    drawn = parser.add_argument_group("spread of the step")
    add_options(drawn, (
        ("--draws", (int, "K"), "draw the step K times, each rank, micro-batch and exchange apart, as real ones differ", {"default": 0}),
        ("--seed", (int, "N"), "numbers to draw by: with the same, plans are compared on the same ranks (default: 0)", {"default": 0}),
    ))  # fmt: skip


def _add_degrees(parser: argparse.ArgumentParser) -> None:
    degrees = parser.add_argument_group("plan by its degrees, instead of --plan")
    add_options(degrees, (
        ("--data-parallel", (int, "D"), "replicas that share the batch"),
        ("--tensor-parallel", (int, "T"), "ranks that share each layer"),
        ("--context-parallel", (int, "C"), "ranks that share every sequence by its tokens"),
        ("--context-method", CONTEXT_METHODS,
         "how they attend to the whole sequence (default: ring): keys and values in a ring, all of them gathered, "
         "or heads shared instead of tokens (all-to-all)"),
        ("--pipeline-parallel", (int, "P"), "pipeline stages"),
        ("--expert-parallel", (int, "E"), "data-parallel ranks that share the experts of a model with several; they are D's, not further ones", {"dest": "expert"}),
        ("--expert-tensor-parallel", (int, "N"),
         "ranks that cut each expert's matrices (default: T); below T, experts lie over tensor-parallel ranks too", {"dest": "expert_tensor"}),
        ("--expert-domain", (int, "N"),
         "GPUs of an NVLink domain: experts' tokens cross nodes once a node and are handed on inside, as DeepEP and HybridEP do"),
        ("--expert-overlap", True, "exchanges of experts' tokens beside another micro-batch's compute (--overlap-moe-expert-parallel-comm, DualPipe)"),
        ("--sharding", SHARDINGS[1:], "what replicas share instead of each holding it: fsdp is FSDP2, hsdp groups of --shard ranks"),
        ("--shard", (int, "N"), "ranks of a group of hsdp"),
        ("--accumulate", (int, "N"), "micro-steps whose gradients are added up; DDP's replicas exchange the sum, fsdp's reduce those of each"),
        ("--no-sync", True, "with fsdp and --accumulate: keep gradients whole until the last micro-step (set_requires_gradient_sync(False))"),
    ))  # fmt: skip
    _add_styles(degrees)
    degrees.add_argument(
        "--schedule", metavar="NAME",
        help=f"pipeline schedule: {', '.join(SCHEDULES)}, or one that a package registers (default: gpipe)",
    )  # fmt: skip


def _add_styles(degrees: argparse._ArgumentGroup) -> None:
    """Add how tensor-parallel ranks share layers, and where activations and the optimizer's state are."""
    add_options(degrees, (
        ("--tensor-style", TENSOR_STYLES[1:], "how ranks share layers, instead of Megatron's way: gather splits every layer's outputs"),
        ("--sequence-parallel", True, "tensor-parallel ranks share what lies between split layers too"),
        ("--vocabulary-parallel", True, "tensor-parallel ranks share embedding, head and loss by vocabulary"),
        ("--tensor-overlap", TENSOR_OVERLAPS[1:],
         "messages of tensor parallelism beside products: none, those of column-split layers' backward, as Megatron-LM "
         "does (default of its recipes), or all of a layer's, piece by piece (--tp-comm-overlap)"),
        ("--recompute", "WHAT", f"activations that backward computes again: {', '.join(RECOMPUTATIONS[1:])}, uniform:N (all blocks, N at a "
         "time), block:N (the first N blocks of each stage), or save:POLICY (torchtitan, MaxText's minimal, ...: docs/memory.md); with "
         "+no-early-stop as PyTorch before 2.1"),
        ("--offload", OFFLOADS[1:], "what lies in the host's memory"),
    ))  # fmt: skip


def _add_pipeline(parser: argparse.ArgumentParser) -> None:
    add_options(parser, (
        ("--micro-batches", (int, "M"), "pieces of a pipelined batch"),
        ("--stages-per-rank", (int, "V"), f"pipeline stages of each rank, for {SEVERAL_STAGES}"),
        ("--stages", "HOW|FILE", f"pipeline stages: balanced by {' or '.join(BALANCES)} of layers (default: {BALANCES[0]}), or a file "
         "with a line of units a stage"),
        ("--schedule-file", "CSV", "the pipeline's actions as PyTorch writes them, instead of --schedule; see `trioflow export schedule`"),
    ))  # fmt: skip


def add_collectives_argument(parser: argparse.ArgumentParser) -> None:
    """Add the model of collectives, for commands that simulate."""
    parser.add_argument(
        "--collectives", metavar="MODEL",
        help=f"fitted collective model, a shipped one by name, or {CLOSED_FORM} (the ring's, over the links)",
    )  # fmt: skip


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option for programs."""
    parser.add_argument("--json", action="store_true", help="print one JSON object for programs")
