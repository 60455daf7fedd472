"""Arguments of the Python interface: each is checked where it enters, and what has no effect is refused."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trioflow
from trioflow import find_largest, make_plan, named_plan, predict, search
from trioflow.base.provenance import PACKAGE
from trioflow.network.message_planner import Chunks

TRACE, PLATFORM = "gpt2-tiny-b8", "cpu2-gloo"
LANGUAGE = ("llama-3.2-1b", "dgx-h100")


DEEP = Path(__file__).parent / "trace/language/million_layers.json"


def plan() -> trioflow.Plan:
    return named_plan("ddp", 2)


REFUSED = {
    "sequence of a loaded trace": lambda: predict(trioflow.load_trace(TRACE), plan(), PLATFORM, sequence=8),
    "precision of a loaded trace": lambda: predict(trioflow.load_trace(TRACE), plan(), PLATFORM, precision="nonsense"),
    "precision of a loaded trace in search": lambda: search(trioflow.load_trace(TRACE), 2, PLATFORM, precision="bf16"),
    "sequence of a named trace": lambda: predict(TRACE, plan(), PLATFORM, sequence=8),
    "largest sequence of a trace": lambda: find_largest(trioflow.load_trace(TRACE), plan(), PLATFORM, "sequence"),
    "largest of what": lambda: find_largest(TRACE, plan(), PLATFORM, "batchs"),
    "replication": lambda: make_plan(data=2, replication="ddpp"),
    "sequence_parallel": lambda: make_plan(tensor=2, sequence_parallel="no"),
    "tensor_style": lambda: make_plan(tensor=2, tensor_style="x"),
    "changed sharding": lambda: replace(plan(), sharding="fsdpp"),
    "column": lambda: make_plan(data=2, tensro=2),
    "degree as text": lambda: make_plan(data="2"),
    "degree as a float": lambda: named_plan("ddp", 2.0),
    "degree as a truth": lambda: named_plan("ddp", True),
    "plan as text without ranks": lambda: predict(TRACE, "ddp", PLATFORM),
    "ranks beside a plan of others": lambda: predict(TRACE, plan(), PLATFORM, ranks=7),
    "no platform": lambda: predict(TRACE, "ddp", ranks=2),
    "options as text": lambda: predict(TRACE, plan(), PLATFORM, options="x"),
    "option": lambda: predict(TRACE, plan(), PLATFORM, pasres=1),
    "option of search": lambda: search(TRACE, 2, PLATFORM, pasres=1),
    "ranks of search": lambda: search(TRACE, 2.5, PLATFORM),
    "no ranks of search": lambda: search(TRACE, [], PLATFORM),
    "no traces": lambda: predict([], plan(), PLATFORM),
    "batch as text": lambda: predict(TRACE, plan(), PLATFORM, batch="32"),
    "batch as a float": lambda: predict(TRACE, plan(), PLATFORM, batch=32.0),
    "draws as text": lambda: predict(TRACE, plan(), PLATFORM, draws="3"),
    "interval as text": lambda: predict(TRACE, plan(), PLATFORM, interval="no"),
    "communication_scale": lambda: predict(TRACE, plan(), PLATFORM, communication_scale=0),
    "communication_scale that is none": lambda: predict(TRACE, plan(), PLATFORM, communication_scale=float("nan")),
    "no compute_scale": lambda: predict(TRACE, plan(), PLATFORM, compute_scale=[]),
    "stages without a pipeline": lambda: predict(TRACE, plan(), PLATFORM, stages="count"),
    "routing without experts": lambda: predict(TRACE, plan(), PLATFORM, routing="power:1"),
    "sequence as text": lambda: predict(LANGUAGE[0], plan(), LANGUAGE[1], sequence="5"),
    "cuda_graphs as text": lambda: predict(LANGUAGE[0], plan(), LANGUAGE[1], sequence=512, cuda_graphs="no"),
    "price": lambda: search(TRACE, 2, PLATFORM, price_per_gpu_hour=float("nan")),
    "a million layers": lambda: predict(str(DEEP), plan(), LANGUAGE[1], sequence=128),
    "chunks of a byte": lambda: predict("gpt2-b8", plan(), "dgx-h100", algorithms="ring", chunks=Chunks(1, 1.0)),
    "power": lambda: search(TRACE, 2, PLATFORM, power_w=-1.0),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_an_argument_that_means_nothing_is_refused(call):
    with pytest.raises(trioflow.TrioflowError):
        call()


def test_numbers_of_numpy_are_numbers():
    usual = predict(TRACE, plan(), PLATFORM, batch=32, compute_scale=1.5, communication_scale=0.5)
    given = predict(
        TRACE,
        named_plan("ddp", np.int64(2)),
        PLATFORM,
        batch=np.int32(32),
        compute_scale=np.float32(1.5),
        communication_scale=np.float32(0.5),
    )
    assert given.step_time_s == usual.step_time_s
    assert repr(make_plan(data=np.int64(2))) == repr(make_plan(data=2))
    ranking = search(TRACE, np.int64(2), PLATFORM, top=np.int64(1))["ranking"]
    assert ranking == search(TRACE, 2, PLATFORM, top=1)["ranking"]


def test_a_prediction_returns_from_a_pool():
    # Folded, so that the timeline of all ranks is made from one rank of each class.
    pipeline = make_plan(data=64, pipeline=2, schedule="1f1b", micro_batches=4)
    for one in (predict(TRACE, plan(), PLATFORM, draws=2), predict("gpt2-b8", pipeline, "dgx-h100")):
        same = pickle.loads(pickle.dumps(one))
        assert same.to_dict() == one.to_dict() and str(same) == str(one)
        assert same.timeline.equals(one.timeline)


@pytest.mark.slow
def test_threads_predict_models_that_nobody_traced_yet(tmp_path):
    code = (
        "import threading, trioflow\n"
        "def ask(tokens):\n"
        "    plan = trioflow.named_plan('ddp', 8)\n"
        "    print(trioflow.predict('llama-3.2-1b', plan, 'dgx-h100', sequence=tokens).step_time_s > 0)\n"
        "threads = [threading.Thread(target=ask, args=(n,)) for n in (256, 384)]\n"
        "[one.start() for one in threads]; [one.join() for one in threads]"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == ["True", "True"], done.stderr


@pytest.mark.parametrize(
    ("call", "python", "command"),
    [
        (lambda: predict(TRACE, plan(), PLATFORM, slow_ranks=[(99, 2)]), "slow_ranks=99: the", "--slow-rank 99: the"),
        (
            lambda: predict(TRACE, plan(), PLATFORM, operator_scales=[("mn", 2)]),
            "operator_scales mn: no",
            "--scale-operator mn",
        ),
        (
            lambda: predict(TRACE, platform=PLATFORM, ranks=2),
            "ranks=2 without a plan; .*plan fsdp, or data, tensor and",
            "--ranks",
        ),
        (lambda: trioflow.named_plan("ddp", 8, data=2), "DP2 = 2 GPUs, not 8", "not 8"),
        (lambda: trioflow.search(TRACE, 2, PLATFORM, power_w=-1), "power_w -1|power_w=-1", "--power-w"),
    ],
)
def test_errors_from_python_name_keywords_and_the_command_flags(call, python, command):
    with pytest.raises(trioflow.TrioflowError, match=python) as caught:
        call()
    assert "--" not in str(caught.value) and command in caught.value.of_command
