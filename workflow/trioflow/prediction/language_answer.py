"""A prediction in the units of language-model training: tokens, model FLOPs, money and energy.

What is left of a long run when it is stopped by failures, and how often to save its state.

Failures come at random (exponentially), also while state is saved or read back; work since the last checkpoint is lost
(J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006: the expected time of
an interval in closed form).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trioflow.base.errors import InputError
from trioflow.base.plan_row import Plan
from trioflow.base.precision_recipes import choose_recipe
from trioflow.base.units import format_time
from trioflow.engine.result import Executed
from trioflow.engine.timeline import select_communication
from trioflow.hardware.machine import Device
from trioflow.parallel.schedules.table import TRAIN
from trioflow.parallel.splits.tensor_parallel import EXCHANGE
from trioflow.prediction.breakdown import measure_exposed
from trioflow.trace.facts import Facts
from trioflow.trace.language.sizes import read_language_model

_HALVINGS = 100


@dataclass(frozen=True)
class Faults:
    """How a run is stopped and goes on."""

    gpu_hours_per_failure: float  # GPU-hours between failures that stop the whole run
    checkpoint_s: float = 0.0  # time in which the run waits for its state to be saved [s]
    restart_s: float = 0.0  # from a failure to the first step after it [s]

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--gpu-hours-per-failure", self.gpu_hours_per_failure, math.nextafter(0.0, 1.0)),
            ("--checkpoint-s", self.checkpoint_s, 0.0),
            ("--restart-s", self.restart_s, 0.0),
        ):
            if not least <= value < math.inf:
                wanted = "positive" if least else "0 or more"
                raise InputError(f"{flag} {value:g}: expected a number that is {wanted}")

    def mtbf_s(self, ranks: int) -> float:
        """Return the mean time between failures of a run on ``ranks`` GPUs [s]."""
        return self.gpu_hours_per_failure * 3600.0 / ranks


def choose_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the work between two checkpoints that leaves the most goodput [s].

    It solves exp((t + d) / m) (1 - t / m) = 1 with the checkpoint's time d and the mean time between failures m; sqrt(2
    d m) is its first order (J. W. Young, 1974).
    """
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = middle + checkpoint_s / mtbf_s + math.log1p(-middle) > 0
        low, high = (middle, high) if above else (low, middle)
    return low * mtbf_s


def measure_goodput(faults: Faults, interval_s: float, ranks: int) -> float:
    """Return the share of a run's time that goes into steps whose work is kept."""
    mtbf_s = faults.mtbf_s(ranks)
    work, whole = interval_s / mtbf_s, (interval_s + faults.checkpoint_s) / mtbf_s
    if not whole:  # saved at no cost after every step: a failure costs its restart alone
        return math.exp(-faults.restart_s / mtbf_s)
    try:
        return work / (math.exp(faults.restart_s / mtbf_s) * math.expm1(whole))
    except OverflowError:
        return 0.0


HOUR_S = 3600.0
_DOUBTED_MFU = 0.6
"""Beyond it an answer says that tables of single products are behind it: a convention."""
_MFU_FORMULA = (
    "(6 x all parameters, embeddings included, + 12 x layers x width x sequence) x tokens/s/GPU over the"
    " peak of the sheet; attention in full, recomputation not counted"
)


def describe_rates(facts: Facts, samples: int, step_time_s: float, ranks: int, device: Device) -> dict[str, Any]:
    """Return a step's tokens and model FLOPs, and the MFU where the device's peak is known; empty for other models."""
    known = read_language_model(facts)
    if known is None or facts.language_model is None or step_time_s <= 0:
        return {}
    model, sequence = known
    tokens = samples * sequence
    rate = tokens / step_time_s / ranks
    flop, formula, trained = (
        model.flop_per_token(sequence),
        _MFU_FORMULA,
        facts.language_model.get("trained_parameters"),
    )
    share, adapters = 1.0, 0
    if trained is not None:
        # A frozen weight has no gradient: 2 FLOPs less; adapters come on top of the model's own weights.
        adapters = trained if facts.language_model.get("lora") else 0
        share = (trained - adapters) / model.parameters
        flop += 6.0 * adapters - 2.0 * (1 - share) * model.active_parameters
        formula = formula.replace("6 x all parameters", "6 x all parameters, 4 x frozen ones")
    found: dict[str, Any] = {
        "sequence": sequence,
        "attention": facts.language_model["attention"],
        "fusion": facts.language_model.get("fusion", "eager"),
        "precision": choose_recipe(str(facts.precision_recipe or facts.precision)).name,
        "parameters": model.parameters,
        **({"active_parameters": model.active_parameters} if model.experts else {}),
        **({} if trained is None else {"trained_parameters": trained}),
        "tokens_per_step": tokens,
        "tokens_per_s": tokens / step_time_s,
        "tokens_per_s_per_gpu": rate,
        "model_flop_per_s_per_gpu": rate * flop,
        "mfu_formula": formula if not model.experts else formula.replace("all", "active", 1),
    }
    peak = device.peak_flop_per_s.get(str(facts.precision))
    if peak:
        bare = flop - (4.0 + 2.0 * share) * model.embedding_parameters
        found["mfu"] = found["model_flop_per_s_per_gpu"] / peak
        found["mfu_without_embeddings"] = rate * bare / peak
    return found


def doubt_rate(rates: Mapping[str, Any]) -> list[str]:
    """Return what to say of a step that is faster than products in a long run may be."""
    if rates.get("mfu", 0.0) <= _DOUBTED_MFU:
        return []
    return [
        f"an MFU of {rates['mfu']:.0%} is more than long steps usually reach: it rests on products that were measured "
        "alone, and slowed as at a GPU's power limit (docs/cost_models.md); take the slow end of the interval for a budget"
    ]


def describe_run(
    rates: Mapping[str, Any],
    tokens: float | None,
    price_per_gpu_hour: float | None,
    power_w: float | None,
    faults: Faults | None = None,
) -> dict[str, Any]:
    """Return what training on many tokens takes at a predicted step's rate; InputError without a positive number or tokens.

    Cost in the currency of ``price_per_gpu_hour`` [1/h], energy by a GPU's ``power_w`` [W]. With ``faults`` time,
    GPU-hours, cost and energy hold what is lost, ``goodput`` what is kept.
    """
    for flag, number in (("--price-per-gpu-hour", price_per_gpu_hour), ("--power-w", power_w)):
        if number is not None and not 0 <= number < float("inf"):
            raise InputError(f"{flag} {number:g}: expected a number that is 0 or more")
    if tokens is None:
        return {}
    if not 0 < tokens < float("inf"):
        raise InputError(f"--tokens {tokens:g} is not positive")
    if "tokens_per_s" not in rates:
        raise InputError("--tokens of a step that has none", fix="name a language model, such as llama-3.1-8b")
    time_s, found = tokens / rates["tokens_per_s"], {"tokens": tokens}
    if faults is not None:
        lost = _describe_faults(faults, rates["ranks"])
        found |= lost
        time_s /= lost["goodput"]
    gpu_hours = time_s * rates["ranks"] / HOUR_S
    found |= {"time_s": time_s, "gpu_hours": gpu_hours}
    if price_per_gpu_hour is not None:
        found["cost"] = gpu_hours * price_per_gpu_hour
    if power_w is not None:
        found |= {"energy_j": gpu_hours * HOUR_S * power_w, "power_w": power_w}
    return found


def _describe_faults(faults: Faults, ranks: int) -> dict[str, float]:
    """Return the mean time between failures, the best interval of checkpoints, and what is kept."""
    mtbf_s = faults.mtbf_s(ranks)
    interval_s = choose_interval_s(faults.checkpoint_s, mtbf_s)
    goodput = measure_goodput(faults, interval_s, ranks)
    if not goodput:
        raise InputError(
            f"a failure every {format_time(mtbf_s)}: no work is ever kept",
            fix="give --gpu-hours-per-failure of one GPU's share, and shorter --checkpoint-s and --restart-s",
        )
    return {"mtbf_s": mtbf_s, "checkpoint_interval_s": interval_s, "goodput": goodput}


def describe_waits(executed: Executed, plan: Plan) -> dict[str, Any]:
    """Return how much of a step the ranks wait: for the pipeline, and for each group's communication.

    ``bubble_share`` (of the step, mean over ranks; only of a pipeline), ``host_share`` (of devices that wait for
    launches; only where these take time) and ``exposed_by_group_s`` [s] by degree: tensor, context, expert, data,
    pipeline; where groups wait at once, each counts.
    """
    graph, timeline = executed.graph, executed.timeline
    if graph.metadata.mode != TRAIN or timeline.empty:
        return {}
    groups = graph.tasks["group"]
    known = [name_group(str(text), plan) for text in groups.cat.categories]
    names = list(dict.fromkeys([*known, "pipeline", "expert"]))
    codes = np.array([names.index(name) for name in [*known, "pipeline"]])[groups.cat.codes]
    if plan.expert > 1:  # all-to-alls of ranks that share sequences are named alike
        exchanged = (graph.tasks["name"] == EXCHANGE).to_numpy(dtype=bool)
        codes = np.where(exchanged, names.index("expert"), codes)
    codes = np.where(select_communication(timeline), codes, -1)
    exposed, waiting_s, idle_s = measure_exposed(timeline, codes, names, executed.like)
    step_s = float(timeline["end_s"].max())
    found: dict[str, Any] = {"exposed_by_group_s": exposed}
    if plan.pipeline > 1:
        found["bubble_share"] = waiting_s / step_s if step_s else 0.0
    if idle_s > waiting_s:
        found["host_share"] = (idle_s - waiting_s) / step_s
    return found


def name_group(text: str, plan: Plan) -> str:
    """Return the degree whose ranks a group holds, by Megatron-LM's order: tensor, context, data, pipeline.

    Gradients of one replica, that the ranks of a sequence add up, are counted with the context.
    """
    ranks = sorted(int(word) for word in text.split(","))  # a broadcast names its root first
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 0
    if ranks[-1] - ranks[0] < plan.tensor:
        return "tensor"
    if step < plan.tensor:  # of whole experts, which lie over tensor-parallel ranks too
        return "data"
    if step >= plan.tensor * plan.replicas:
        return "pipeline"
    return "context" if ranks[-1] - ranks[0] < plan.tensor * plan.context else "data"
