"""Precision recipes: in which number formats a framework holds, computes, exchanges and updates.

A step's *arithmetic* (fp32, tf32, bf16, fp16) says how fast its products are;
its *recipe* says besides what lies in memory and what goes over the network.

References
----------
PyTorch ``torch.autocast``; ``torch.distributed.fsdp.MixedPrecisionPolicy`` (``fsdp2-mixed`` has
``reduce_dtype`` fp32, ``fsdp2-bf16-reduce`` bf16 or none, which is the same);
Transformer Engine's recipes, as Megatron Core runs them, for ``fp8`` and ``fp8-block``;
Megatron Core, "Distributed Optimizer" (bf16 weights with fp32 gradients: 18
bytes per parameter, 6 + 12/d distributed; half-precision gradients, as of fp16 and the ``-bf16-reduce`` recipes with
``grad_reduce_in_fp32`` false: 16, 4 + 12/d, and during the update 4 or 4/d more for a copy of them in fp32);
``fp8_param_gather`` for the ``-params`` recipes (Transformer Engine's FP8 weights, row by row and transposed, and none in
bf16). DeepSpeed, ``runtime/bf16_optimizer.py``: ``clear_lp_grads`` fills the bf16 gradients with zeros and keeps them
beside those in fp32, so 8 + 12/d; ``runtime/pipe/engine.py`` sums them once, behind the last backward.
``runtime/zero/stage_1_and_2.py`` (``deepspeed-bf16-reduce``, ``grad_accum_dtype`` left out): bf16 gradients too; ZeRO-2
copies those of each micro-step into a buffer of 500 million elements, sums it over all replicas, waits for it
(``overlap_comm`` false) and keeps its slice (``average_tensor``, ``allreduce_and_scatter``). ColossalAI
``zero/low_level/low_level_optim.py``: buckets of 12 x 2^20 elements, beside backward; stage 1 sums, stage 2 scatters.
"""

from typing import Any

from msgspec import Struct

from trioflow.base.errors import InputError

PYTORCH, MEGATRON, NANOTRON, DEEPSPEED = "pytorch", "megatron", "nanotron", "deepspeed"
COLOSSALAI = "colossalai"
WORDS = {
    PYTORCH: "eager PyTorch",
    MEGATRON: "Megatron-LM",
    NANOTRON: "nanotron",
    DEEPSPEED: "DeepSpeed",
    COLOSSALAI: "ColossalAI",
}
"""Frameworks, and how an answer calls them."""


class PrecisionRecipe(Struct, frozen=True):
    """The number formats of a training step, in bytes of an element."""

    name: str  # the word that users give
    arithmetic: str  # format of products and activations: fp32, tf32, bf16 or fp16
    parameter_bytes: int = 4  # of a weight as forward and backward read it
    # Of a gradient as it is kept, added up over micro-batches and read by the optimizer (a main
    # gradient, where there is one).
    gradient_bytes: int = 4
    # Of the copy of a weight that the optimizer updates beside the one that forward reads; 0 where
    # they are the same.
    main_parameter_bytes: int = 0
    state_bytes: int = 4  # of each of the optimizer's states of a parameter
    gather_bytes: int = 4  # of a weight as it is gathered from those who share it
    reduce_bytes: int = 4  # of a gradient as it is exchanged
    # Of a gradient as a micro-batch's backward makes it, where the framework adds it to the main
    # gradient only afterwards; 0 where products add to the main gradient themselves (Megatron-LM's
    # gradient accumulation fusion).
    made_bytes: int = 0
    keeps_made: bool = False  # whether those stay beside the main gradients, as DeepSpeed's do
    shards_main: bool = False
    # What linear layers of blocks compute in where that is not the arithmetic: fp8 (a scale for each
    # tensor, of its own values), fp8-delayed (of its values in steps before) or fp8-block (one for 128
    # values of a row); empty otherwise.
    products: str = ""
    # Whether weights that are multiplied in FP8 lie there, and are gathered, in FP8 alone.
    fp8_parameters: bool = False
    # Tensors as large as the scores, in fp32, that the loss has at one time: Megatron-LM's works in the
    # one that the scores are cast to, nanotron's in a second one; 0 where PyTorch's cross-entropy runs.
    loss_copies: int = 0
    # Buffers that are always there for what sequence parallelism gathers: Megatron-LM has one, nanotron
    # one for activations and one for gradients.
    gather_buffers: int = 0
    # Whose kernels and host code run where nobody says: pytorch (transformers, torchtitan), megatron, nanotron or
    # deepspeed (GPT-NeoX, Megatron-DeepSpeed), colossalai.
    framework: str = PYTORCH
    # Of a bucket of ZeRO-2 where no plan says another limit; 0 for the plan's
    bucket_elements: int = 0
    # Shardings whose replicas sum whole buckets and then take their slices of them
    sums_whole: tuple[str, ...] = ()
    waits_for_buckets: bool = False  # whether backward waits for each bucket of ZeRO-2

    @property
    def keeps_main_gradients(self) -> bool:
        """Whether gradients lie in buffers that are always there, as Megatron-LM's and nanotron's do."""
        return self.framework not in (PYTORCH, COLOSSALAI)

    @property
    def adds_gradients(self) -> bool:
        """Whether products can add to the main gradients themselves, as Megatron-LM's do."""
        return self.keeps_main_gradients and not self.made_bytes

    @property
    def casts_model(self) -> bool:
        """Whether the model itself is in half precision; autocast leaves its weights alone."""
        return self.parameter_bytes < 4

    @property
    def reduces_whole(self) -> bool:
        """Whether replicas that share the optimizer's state sum all gradients at once, behind the last backward.

        nanotron makes no DDP then (``trainer.py``, ``make_ddp``): one all-reduce of the main gradients, and one
        all-gather of the weights after the update; so does DeepSpeed's bf16 optimizer. Megatron-LM scatters bucket by
        bucket, beside backward.
        """
        return self.framework in (NANOTRON, DEEPSPEED)

    @property
    def copies_gathered(self) -> bool:
        """Whether weights are copied to be gathered, and copied back (nanotron's ``all_gather_coalesced``)."""
        return self.framework == NANOTRON

    @property
    def bucket_width(self) -> float:
        """Bytes that replicas exchange for each byte of DDP's buckets, which hold gradients as backward makes them."""
        return self.reduce_bytes / self.made_bytes if self.made_bytes else 1.0

    def describe(self) -> str:
        """Return the recipe in words."""
        size = {2: "half", 4: "fp32"}
        if not self.casts_model:
            plain = "" if self.name == self.arithmetic else f"{self.arithmetic} "
            words = "" if self.arithmetic in ("fp32", "tf32") else ": autocast over fp32 weights"
            return f"{plain}{self.name}{words}"
        weights = f"{self.arithmetic} weights"
        if self.main_parameter_bytes:
            weights += f" and {size[self.main_parameter_bytes]} main weights"
        kept = size[self.gradient_bytes].replace("half", self.arithmetic)
        state = size[self.state_bytes].replace("half", self.arithmetic)
        if self.shards_main and self.reduce_bytes != self.gradient_bytes:
            kept += f" (reduced in {size[self.reduce_bytes].replace('half', self.arithmetic)})"
        linear = "linear layers of blocks in FP8, " * bool(self.products)
        linear += "their weights too, other " * self.fp8_parameters
        kept += f" (and {self.arithmetic} ones that backward makes)" * self.keeps_made
        return f"{self.name}: {linear}{weights}, {kept} gradients, {state} optimizer state"


_PLAIN = tuple(PrecisionRecipe(name, name) for name in ("fp32", "tf32", "bf16", "fp16"))
_MAIN: dict[str, Any] = {"parameter_bytes": 2, "main_parameter_bytes": 4, "gather_bytes": 2}
_MEGATRON: dict[str, Any] = {"loss_copies": 1, "gather_buffers": 1, "framework": MEGATRON, **_MAIN}
_HALF: dict[str, Any] = {"gradient_bytes": 2, "reduce_bytes": 2, **_MEGATRON}
_DEEPSPEED: dict[str, Any] = {
    "gradient_bytes": 2,
    "reduce_bytes": 2,
    "loss_copies": 1,
    "framework": DEEPSPEED,
    "bucket_elements": 500_000_000,
    "sums_whole": ("distributed", "partitioned"),
    "waits_for_buckets": True,
    **_MAIN,
}
_FP8 = tuple(
    PrecisionRecipe(
        f"{products}{'-params' * params}{'-bf16-reduce' * half}",
        "bf16",
        products=products,
        fp8_parameters=params,
        **(_HALF if half else _MEGATRON),
    )
    for products in ("fp8", "fp8-delayed", "fp8-block")
    for params in (False, True)
    for half in (False, True)
)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        *_PLAIN,
        PrecisionRecipe("fsdp2-mixed", "bf16", shards_main=True, **_MAIN),
        PrecisionRecipe("fsdp2-bf16-reduce", "bf16", reduce_bytes=2, shards_main=True, **_MAIN),
        *(
            PrecisionRecipe(f"{MEGATRON}-{name}", name, gather_buffers=1, framework=MEGATRON)
            for name in ("fp32", "tf32")
        ),
        PrecisionRecipe("megatron-bf16", "bf16", **_MEGATRON),
        PrecisionRecipe("megatron-bf16-reduce", "bf16", **_HALF),
        PrecisionRecipe("megatron-fp16", "fp16", **_HALF),
        PrecisionRecipe("megatron-fp16-fp32-reduce", "fp16", **_MEGATRON),
        *_FP8,
        PrecisionRecipe("deepspeed-bf16", "bf16", made_bytes=2, keeps_made=True, **{**_DEEPSPEED, "gradient_bytes": 4}),
        PrecisionRecipe("deepspeed-bf16-reduce", "bf16", **_DEEPSPEED),
        PrecisionRecipe(
            "colossalai-bf16",
            "bf16",
            gradient_bytes=2,
            reduce_bytes=2,
            framework=COLOSSALAI,
            bucket_elements=12 * 2**20,
            sums_whole=("distributed",),
            **_MAIN,
        ),
        PrecisionRecipe(
            "nanotron-bf16",
            "bf16",
            made_bytes=2,
            loss_copies=2,
            gather_buffers=2,
            framework=NANOTRON,
            sums_whole=("distributed",),
            **_MAIN,
        ),
        PrecisionRecipe(
            "pure-bf16", "bf16", parameter_bytes=2, gradient_bytes=2, state_bytes=2, gather_bytes=2, reduce_bytes=2
        ),
    )
}
"""By name; fp32, tf32, bf16 and fp16 keep everything in single precision, the last two compute by autocast."""
DEFAULT_RECIPE = "megatron-bf16"
"""Of a language model where nothing is said: people train so, and every plan and mixture of experts runs so."""
_AUTOCAST = {"autocast": "bf16"}
"""Other words for some of them."""
RECIPE_NAMES = (*RECIPES, *_AUTOCAST)


def choose_recipe(name: str, place: str = "--precision") -> PrecisionRecipe:
    """Return a recipe by its name; InputError where there is none."""
    recipe = RECIPES.get(_AUTOCAST.get(name, name))
    if recipe is None:
        raise InputError(
            f"{place}: unknown precision {name!r}",
            fix=f"use {place} {name.replace('+', ' --fusion ')}"
            if "+" in name
            else f"use one of {', '.join(RECIPE_NAMES)}",
        )
    return recipe
