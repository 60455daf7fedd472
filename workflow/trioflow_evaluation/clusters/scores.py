"""How far predicted peaks of memory and steps are off, and how likely runs were to survive; without torch, for the page.

Survival: the fit of ``parallel.memory.peak``, and its judgement. Of the cases (``CLUSTER_MEMORY``) that failed the
ones count that are labelled out of memory; a model's runs are judged by what was fitted to the others'.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from trioflow import tables
from trioflow.base.provenance import stamp
from trioflow.hardware.machine import load_device
from trioflow.parallel.memory.peak import DOUBTED, LIKELY, SURVIVAL, Survival, count_outside, load_survival
from trioflow.report.pages import NOTHING, write_markdown, write_percent
from trioflow.sweeps.search_space import RankedStep

from trioflow_evaluation.chances import score_pairs
from trioflow_evaluation.evaluate import evaluate
from trioflow_evaluation.tables import CLUSTER_MEMORY, CLUSTER_STEPS

RAN, FITTED, FAILED = "ran", "ran, fitted on", "failed"
BEFORE = "pipelines before their fix"
"""Runs of nanotron's pipelines before its engine was mended: reported, neither fitted on nor among the others."""
SUCCEEDED, RAN_OUT = "Success", "OOM"
"""How a job ended, beside other failures, which memory does not explain."""

CARD = "h100-sxm"
"""Sheet of the runs' GPU."""
GPUS_OF_A_NODE = 8
SEQUENCE = 4096
"""Tokens of a sample."""
FAST = 0.1
"""Model FLOPs utilisation above which a run is one that someone would repeat."""

BINS = (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0)
"""Ends of the reliability table's bins."""
_STARTS = (0.0, 0.3, 0.6)
"""Of ``kept_share``, from which the likelihood is maximised."""
SCHEMAS = {"cluster_memory": CLUSTER_MEMORY, "cluster_steps": CLUSTER_STEPS}


def join_parts(paths: Sequence[str | Path], name: str, output: str | Path) -> None:
    """Write the tables of all parts of the runs as one; ``name`` is one of ``SCHEMAS``."""
    schema = SCHEMAS[name]
    parts = [tables.read_table(path, name, schema) for path in paths]
    cases = pd.concat([part for part in parts if len(part)], ignore_index=True)
    tables.write_table(cases, name, output, stamp(paths), schema)


def name_model(parameters: float) -> str:
    """Return the workload of a model of so many parameters [1e9]."""
    return f"nanotron-{parameters:g}b"


def is_fitted_on(parameters: float, nodes: int, tensor: int = 1) -> bool:
    """Return whether fits may use such runs: 1.34 B on 1 and 2 nodes, and on 4 in tensor groups beyond a node."""
    return parameters == 1.34 and nodes <= (4 if tensor > 8 else 2)


def list_needs(cases: pd.DataFrame) -> NDArray[np.float64]:
    """Return what each run's fullest rank is handed out, what its allocator wants, and the room on an H100 [3, runs] [bytes]."""
    card = load_device(CARD).usable_memory_bytes
    degrees = cases[["data", "tensor", "pipeline"]].itertuples(index=False)
    room = [card - count_outside(groups) for groups in degrees]
    return np.array([cases["fullest_bytes"], cases["fullest_reserved_bytes"], room], np.float64)


def find_odds(needs: NDArray[np.float64], survival: Survival | None = None) -> NDArray[np.float64]:
    """Return the probability of each run to survive (``needs``: `list_needs`), by the shipped numbers by default."""
    known, (peak, wanted, room) = survival or load_survival(), needs
    return known.find_probabilities(peak + known.kept_share * (wanted - peak), room)


def score_steps(cases: pd.DataFrame) -> pd.DataFrame:
    """Return `evaluate.evaluate` of steps by set, network, how the plan lies on nodes, model and number of nodes.

    A refused run has no prediction: it is outside of everything.
    """
    judged = judge_order(cases)
    groups = [
        ("all runs", cases),
        (BEFORE, cases[cases["set"] == BEFORE]),
        ("all others", judged),
        (FITTED, cases[cases["set"] == FITTED]),
        (f"MFU above {write_percent(FAST, 0)}", judged[judged["mfu"] > FAST]),
        *((name, judged[chosen]) for name, chosen in split_by_nodes(judged).items()),
        *((f"network: {name}", rows) for name, rows in judged.groupby("network")),
        *((f"{p:g} B", rows) for p, rows in judged.groupby("parameters")),
        *((f"{n} {'node' if n == 1 else 'nodes'}", rows) for n, rows in judged.groupby("nodes")),
    ]
    return evaluate(((name, rows) for name, rows in groups if len(rows)), CELL)


def split_by_nodes(cases: pd.DataFrame) -> dict[str, pd.Series]:
    """Return which runs are of each way to lie on nodes."""
    several, beyond = cases["nodes"] > 1, cases["tensor"] > GPUS_OF_A_NODE
    chained = several & (cases["pipeline"] > 1) & ~beyond
    return {
        "on one node": ~several,
        "replicas over nodes": several & ~chained & ~beyond,
        "pipelines over nodes": chained,
        "tensor groups beyond a node": beyond,
    }


def mark_crowded(memory: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return the steps of runs with ``crowded``: whether they are less likely to fit an H100 than `memory.peak.DOUBTED`."""
    key = [*_PLAN, "micro_batch", "accumulate"]
    sizes = ["fullest_bytes", "fullest_reserved_bytes"]
    memory_of = memory.loc[memory["set"] != FAILED, [*key, *sizes]].drop_duplicates(key)
    joined = steps[key].merge(memory_of, how="left", on=key).fillna(dict.fromkeys(sizes, 0.0))
    return steps.assign(crowded=find_odds(list_needs(joined)) < DOUBTED)


def score_chances(cases: pd.DataFrame) -> pd.DataFrame:
    """Return `chances.score_pairs` of runs of one model on as many nodes of one network."""
    return score_pairs(
        [
            (RankedStep(row["predicted_s"], 0.0, 0.0), row["measured_s"])
            for row in cell.sort_values("predicted_s").to_dict("records")
        ]
        for _, cell in judge_order(cases).dropna(subset="predicted_s").groupby(CELL)
    )


CELL = ["parameters", "nodes", "network"]
"""What runs share that somebody would choose among."""
_PLAN = ["parameters", "nodes", "data", "tensor", "pipeline", "zero"]


def judge_order(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that are judged: neither pipelines before their fix nor runs that may be fitted on."""
    return cases[cases["set"] == RAN]


def choose_cases(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that succeeded or ran out of memory, with ``survived``."""
    chosen = cases[cases["status"].isin((SUCCEEDED, RAN_OUT))]
    return chosen.assign(survived=chosen["status"] == SUCCEEDED)


def fit_survival(cases: pd.DataFrame) -> Survival:
    """Return the numbers that make how the cases ended most likely."""
    from scipy.optimize import minimize
    from scipy.special import expit

    needs, survived = list_needs(cases), cases["survived"].to_numpy()
    least = 1 / (len(cases) + 2)  # what as many runs without a lapse leave open

    def read(numbers: NDArray[np.float64]) -> Survival:
        location, scale, kept, lapse = numbers.tolist()
        most_kept, lapse = min(max(kept, 0.0), 1.0), max(float(expit(lapse)), least)
        return Survival(location, float(np.exp(scale)), most_kept, lapse)

    def miss(numbers: NDArray[np.float64]) -> float:
        odds = np.clip(find_odds(needs, read(numbers)), 1e-12, 1 - 1e-12)
        return -float(np.log(np.where(survived, odds, 1 - odds)).sum())

    most: Any = {"maxiter": 2000, "maxfev": 2000, "xatol": 1e-5, "fatol": 1e-5}
    fits = [minimize(miss, [0.2, -3.0, kept, -5.0], method="Nelder-Mead", options=most) for kept in _STARTS]
    return read(min(fits, key=lambda one: float(one.fun)).x)


def write_survival(cases: pd.DataFrame) -> None:
    """Rewrite the numbers that ship: of all cases, and without each model's."""
    known = SURVIVAL.read_text(encoding="utf-8").splitlines()
    lines = [line for line in known if line.startswith(("#", "left_out"))]
    for left_out in (None, *sorted(set(cases["parameters"]))):
        rest = cases[cases["parameters"] != left_out]
        numbers = [f"{number:.4g}" for number in vars(fit_survival(rest)).values()]
        ends = [str(len(rest)), str(int((~rest["survived"]).sum()))]
        name = "" if left_out is None else name_model(left_out)
        lines.append("\t".join([name, *ends, *numbers]))
    SURVIVAL.write_text("\n".join(lines) + "\n", encoding="utf-8")


def judge_survival(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases with ``odds``: each model's by the shipped numbers that were fitted without it."""
    odds = pd.Series(np.nan, index=cases.index)
    for parameters, of_size in cases.groupby("parameters"):
        odds[of_size.index] = find_odds(list_needs(of_size), load_survival(name_model(float(str(parameters)))))
    return cases.assign(odds=odds)


def score_survival(judged: pd.DataFrame) -> pd.DataFrame:
    """Return by ``group`` (all, models, runs by themselves) how often the odds are right, their Brier score and median errors of sizes.

    Sizes of all and of the models are judged on the runs that nothing was fitted on, without pipelines before their fix.
    """
    models = ((name_model(float(str(size))), rows) for size, rows in judged.groupby("parameters"))
    scores = [_score_odds(name, rows, rows["set"] == RAN) for name, rows in (("all", judged), *models)]
    for name in (FITTED, BEFORE):
        if len(rows := judged[judged["set"] == name]):
            scores.append(_score_odds(name, rows, rows["set"] == name))
    return pd.DataFrame(scores)


def _score_odds(name: str, rows: pd.DataFrame, is_sized: pd.Series) -> dict[str, Any]:
    sized, miss = rows[rows["survived"] & is_sized], rows["odds"] - rows["survived"]
    pairs = {"reserved": ("reserved_bytes", "measured_bytes"), "update": ("update_bytes", "measured_update_bytes")}
    # As plain floats: no model's median is NaN where none of its runs survived.
    off = {
        name: (sized[one].astype(float) / sized[other].astype(float) - 1).abs() for name, (one, other) in pairs.items()
    }
    survived = int(rows["survived"].sum())
    return {
        "group": name,
        "survived": survived,
        "failed": len(rows) - survived,
        "sized": len(sized),
        "accuracy": float(((rows["odds"] >= LIKELY) == rows["survived"]).mean()),
        "brier": float((miss**2).mean()),
        **{name: float(one.median()) for name, one in off.items()},
        "reserved_90": float(off["reserved"].quantile(0.9)),
    }


def tabulate_reliability(judged: pd.DataFrame) -> pd.DataFrame:
    """Return for each bin of the odds how many ``runs`` there are, their mean ``odds`` and the share that ``survived``."""
    bins = pd.cut(judged["odds"], list(BINS), include_lowest=True, labels=False)
    groups = judged.assign(bin=bins).groupby("bin")
    return groups.agg(runs=("odds", "size"), odds=("odds", "mean"), survived=("survived", "mean"))


def write_survival_scores(judged: pd.DataFrame) -> str:
    """Return the scores by model in Markdown."""
    heads = (
        "model",
        "succeeded",
        "ran out",
        "odds right",
        "Brier score",
        "sizes judged",
        "reserved, median error",
        "update's peak, median error",
    )
    scores = [
        (
            row["group"],
            row["survived"],
            row["failed"],
            write_percent(row["accuracy"]),
            f"{row['brier']:.3f}",
            row["sized"],
            *(NOTHING if np.isnan(row[name]) else write_percent(row[name]) for name in ("reserved", "update")),
        )
        for row in score_survival(judged).to_dict("records")
    ]
    return write_markdown(heads, scores)
