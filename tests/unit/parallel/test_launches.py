"""Host time of eager training: what a launch takes where no trace holds host times."""

from dataclasses import replace

import numpy as np
import pytest
from trioflow import load_trace, make_plan, predict
from trioflow.base.precision_recipes import MEGATRON, NANOTRON
from trioflow.costmodel.device_times import NO_HOST, find_launch_s, host_times
from trioflow.hardware.platform import load_platform
from trioflow.trace.store import Trace


@pytest.fixture(scope="module")
def trace():
    return load_trace("gpt2-b8")


def step_s(trace, launch_s, **degrees):
    platform = load_platform("dgx-h100", 8)
    return predict(
        trace,
        make_plan(**degrees),
        replace(platform, host={**platform.host, "launch_pytorch_s": launch_s}),
    )


def count_launches(trace):
    work = trace.operators[["flop", "read_bytes", "write_bytes"]]
    return int((work != 0).any(axis=1).sum())


def test_a_step_lasts_as_long_as_its_launches_where_the_device_is_faster(trace):
    launch_s = 1e-3
    bare, held = step_s(trace, 0.0), step_s(trace, launch_s)
    least_s = count_launches(trace) * launch_s
    assert bare.step_time_s < least_s <= held.step_time_s < least_s + bare.step_time_s
    hidden = step_s(trace, 1e-9)
    assert hidden.step_time_s == pytest.approx(bare.step_time_s, rel=0.01)


def test_tensor_ranks_and_micro_batches_launch_as_often_as_one(trace):
    """Twice the tensor ranks halve the device's work and no launch; each micro-batch launches again."""
    launch_s = 1e-3
    one, two = step_s(trace, launch_s), step_s(trace, launch_s, tensor=2)
    assert two.step_time_s >= 0.95 * one.step_time_s


def test_recorded_host_times_stay(trace):
    operators = trace.operators.assign(device_ns=np.int64(1000), cpu_ns=np.int64(7))
    recorded = Trace(operators, trace.tensors, replace(trace.facts, step_time_source="profile"))
    assert host_times(recorded, operators, 1e-4) == pytest.approx(np.full(len(operators), 7e-9))
    predicted = Trace(operators, trace.tensors, replace(trace.facts, step_time_source="predicted"))
    assert host_times(predicted, operators, 1e-4) == pytest.approx(np.full(len(operators), 1e-4))
    assert host_times(predicted, operators, 0.0) == pytest.approx(np.full(len(operators), 7e-9))


def test_the_answer_says_what_a_launch_takes(trace):
    held = " ".join(step_s(trace, 1e-3).warnings)
    assert "the host takes 1e+03 us for each" in held and NO_HOST not in held
    assert NO_HOST in " ".join(step_s(trace, 0.0).warnings)


@pytest.mark.parametrize("name", ["p5-h100", "dgx-h100", "dgx-h200", "dgx-a100"])
def test_machines_say_what_a_launch_takes_each_framework_with_its_source(name):
    platform = load_platform(name, 8)
    launches = {
        framework: platform.host[f"launch_{framework}_s"]
        for framework in ("pytorch", "megatron", "nanotron")
    }
    assert all(10e-6 < launch_s < 200e-6 for launch_s in launches.values())
    # Megatron's and nanotron's Python does more for each kernel than PyTorch's own.
    assert launches["pytorch"] < min(launches["megatron"], launches["nanotron"])
    assert all(platform.sources[f"host.launch_{framework}_s"] for framework in launches)


@pytest.mark.parametrize(("recipe", "launch_s"), [
    (None, 1.0), ("fsdp2-mixed", 1.0), ("megatron-bf16", 2.0), ("fp8", 2.0), ("nanotron-bf16", 3.0),
])  # fmt: skip
def test_the_recipe_s_framework_decides_what_a_launch_takes(trace, recipe, launch_s):
    facts = replace(trace.facts, precision_recipe=recipe)
    host = {"launch_megatron_s": 2.0, "launch_nanotron_s": 3.0, "launch_s": 1.0}
    assert find_launch_s(host, facts) == launch_s
    assert find_launch_s({**host, "launch_pytorch_s": 4.0}, facts) == (4.0 if launch_s == 1.0 else launch_s)  # fmt: skip
    assert find_launch_s({}, facts) == 0.0


def test_megatron_s_host_waits_for_each_message_of_a_pipeline(trace):
    """Each of 4 micro-batches and 1 more stage launches anew; elsewhere the host runs ahead while the device waits."""
    facts = replace(trace.facts, precision_recipe="megatron-bf16")
    of_megatron = Trace(trace.operators, trace.tensors, facts)
    platform = load_platform("dgx-h100", 8)
    launch_s, steps = 1e-3, []
    plan = make_plan(pipeline=4, schedule="1f1b", micro_batches=4)
    for one, key in ((trace, "launch_pytorch_s"), (of_megatron, "launch_megatron_s")):
        held = replace(platform, host={**platform.host, key: launch_s})
        steps.append(predict(one, plan, held).step_time_s)
    # Of stages as long as one another, 4 micro-batches pass 4 at a time one after the other.
    least_s = count_launches(trace) * launch_s * (4 + 4 - 1) / 4 / 2
    assert steps[1] > max(1.2 * steps[0], least_s)


def test_an_exchange_of_a_tensor_group_keeps_the_host_on_several_slow_nodes(trace):
    """Once for each rank of the group; one node does not pay it, nor does the fast network."""
    assert "exchange_per_rank_s" not in load_platform("p5-h100", 32).host
    platform = load_platform("p5-h100-slow", 32)
    inside_s, beyond_s = (
        platform.host[f"exchange_per_rank{end}_s"] for end in ("", "_beyond_node")
    )
    key = "tensor_parallel_forward_s"
    for degrees, wanted_s in (
        ({"data": 2, "tensor": 4, "pipeline": 4}, 4 * inside_s),
        ({"data": 4, "tensor": 2, "pipeline": 4}, 2 * inside_s),
        ({"data": 8, "tensor": 4}, 4 * inside_s),
        ({"data": 2, "tensor": 16}, 16 * (inside_s + beyond_s)),
        ({"tensor": 4, "pipeline": 2}, 0),
    ):
        host = platform.host_of(make_plan(**degrees), NANOTRON)
        assert host.get(key, 0.0) == pytest.approx(wanted_s)
        assert not any(name.startswith("exchange") for name in host)
        assert key not in platform.host_of(make_plan(**degrees), MEGATRON)
    facts = replace(trace.facts, precision_recipe="nanotron-bf16")
    of_nanotron = Trace(trace.operators, trace.tensors, facts)
    plan = make_plan(data=2, tensor=4, pipeline=4, schedule="1f1b", micro_batches=8)
    slow, fast = (
        predict(
            of_nanotron, plan, replace(platform, host={**platform.host, "exchange_per_rank_s": some_s}),
            batch=128, memory=False,
        ).step_time_s
        for some_s in (0.01, 0.0)
    )  # fmt: skip
    assert slow > fast + 8 * 4 * 0.01
