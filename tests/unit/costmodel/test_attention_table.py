"""Fused attention in half precision: shapes of operators, the tables' form, the model that uses them."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from trioflow.base.errors import InputError
from trioflow.costmodel.choices import choose_operator_model, find_mask
from trioflow.costmodel.operators.model import load_shipped_models
from trioflow.costmodel.operators.precision import (
    BACKWARD_FLOP,
    BACKWARD_SHARES,
    DETERMINISTIC,
    SHAPE,
    VERSIONS,
    attention_columns,
    load_tensor_tables,
    sustained_time,
)
from trioflow.hardware.machine import load_device
from trioflow.trace.store import load_trace
from trioflow_evaluation.fits.half_precision import fit_attention

FLASH = "aten::_scaled_dot_product_flash_attention"
BACKWARD_RATIO = BACKWARD_FLOP * BACKWARD_SHARES[1] / BACKWARD_SHARES[0]


def make_operator(name=FLASH, batch=4, heads=32, groups=8, sequence=4096, size=128):
    """Return one operator's row; its FLOPs count queries times keys in full, as traces do."""
    query, key = [batch, heads, sequence, size], [batch, groups, sequence, size]
    inputs, outputs, flop = [query, key, key], [query], 4 * batch * heads * sequence**2 * size
    if "backward" in name:
        inputs, outputs, flop = [query, query, key, key, query], [query, key, key], flop * 5 // 2
    return {
        "name": name,
        "phase": "backward" if "backward" in name else "forward",
        "module": "m",
        "flop": flop,
        "read_bytes": 2 * sum(math.prod(shape) for shape in inputs),
        "write_bytes": 2 * sum(math.prod(shape) for shape in outputs),
        "input_shapes": inputs,
        "output_shapes": outputs,
        "kind": "compute",
        "device_ns": 0,
    }


def make_operators(*rows):
    return pd.DataFrame(list(rows)).assign(op_id=range(len(rows)))


def sustained_more(sheet):
    """Return what computing takes more in a step than in the products' table, at the peak's rate."""
    alone = load_tensor_tables().tables[sheet.name].compute(sheet.peak("bf16"))
    return sustained_time(sheet, alone) - alone


def time_s(table, causal=True, **sizes):
    operators = make_operators(make_operator(**sizes))
    shape = attention_columns(operators, causal)
    rows = pd.DataFrame({"flop": operators["flop"] * shape["attention_share"]}).assign(**shape)
    return float(table.predict(rows)[0])


def test_shapes_are_read_in_either_order_and_from_gradients():
    query, key = [2, 8, 512, 64], [2, 4, 512, 64]
    by_rows = [[2, 512, 8, 64], [2, 512, 4, 64], [2, 512, 4, 64]]
    operators = pd.DataFrame(
        {
            "name": [
                FLASH,
                FLASH + "_backward",
                "aten::_flash_attention_forward",
                "flash_attn::_flash_attn_forward",
                "aten::mm",
                FLASH,
            ],
            "input_shapes": [
                [query, key, key],
                [query, query, key, key, query],
                by_rows,
                by_rows,
                [[2, 3], [3, 4]],
                None,
            ],
        }
    )
    found = attention_columns(operators, causal=True)
    pairs = 512 * 512 / 2
    assert found["attention_flop"].tolist() == [256 * pairs, 640 * pairs, 256 * pairs, 256 * pairs, 0, 0]
    assert (found["attention_heads"][:4] == 8).all() and (found["attention_groups"][:4] == 0.5).all()
    assert found["attention_backward"].tolist() == [0, 1, 0, 0, 0, 0]
    assert all((column[4:] == 0).all() for column in found.values()) and list(found) == list(SHAPE)
    assert attention_columns(operators, causal=False)["attention_flop"][0] == 512 * pairs


@pytest.mark.parametrize("name", sorted(load_tensor_tables().attention))
def test_attention_is_monotone_and_at_most_proportional_in_heads(name):
    table = load_tensor_tables().attention[name]
    for batch in (1, 3, 17):
        for heads, groups in ((1, 1), (8, 8), (32, 4)):
            for sequence in (300, 1024, 16384):
                base = {"batch": batch, "heads": heads, "groups": groups, "sequence": sequence}
                once = time_s(table, **base)
                for change in ({"batch": 2 * batch}, {"heads": 2 * heads, "groups": 2 * groups}):
                    assert once <= time_s(table, **{**base, **change}) <= 2 * once
                assert once <= time_s(table, **{**base, "sequence": sequence + 1})
                assert once <= time_s(table, **{**base, "size": 256})
                assert once <= time_s(table, causal=False, **base)


def test_half_of_a_large_causal_square_is_computed_and_gradients_follow_the_published_ratio():
    table = load_tensor_tables().attention["a100-sxm4-80gb"]
    large = {"sequence": 32768, "batch": 8}
    assert time_s(table, causal=False, **large) / time_s(table, **large) == pytest.approx(2, rel=0.03)
    assert time_s(table, name=FLASH + "_backward") == pytest.approx(BACKWARD_RATIO * time_s(table))
    # FlashAttention 2 reaches 190 TFLOP/s of an A100 at this length (its paper, figure 5).
    reached = 2 * 8 * 32 * 32768**2 * 128 / time_s(table, **large)
    assert 0.5 < reached / load_device("a100-sxm4-80gb").peak("bf16") < 0.73


@pytest.mark.parametrize(("device", "runs"), [("h100-sxm", 2), ("h200", 2), ("b200", 3), ("a100-sxm4-80gb", 3)])
def test_pytorch_s_own_attention_is_version_2_on_hopper_and_as_fast_as_the_table_elsewhere(device, runs):
    """What a step or a name says comes before what PyTorch chooses."""
    table = load_tensor_tables().attention[device]
    cudnn = make_operator("aten::_scaled_dot_product_cudnn_attention")
    package = make_operator("flash_attn::_flash_attn_forward")
    package["input_shapes"] = [[b, n, h, d] for b, h, n, d in package["input_shapes"]]
    operators = make_operators(make_operator(), cudnn, package)
    times = {
        version: table.predict(rows)
        for version in (0.0, *VERSIONS.values())
        for shape in [attention_columns(operators, True, version)]
        for rows in [pd.DataFrame({"flop": operators["flop"] * shape["attention_share"]}).assign(**shape)]
    }
    middle = sum(table.version_2) / 2
    assert middle == {"h100-sxm": 1.75, "h200": 1.75, "b200": 2.1, "a100-sxm4-80gb": 1}[device]
    assert times[2.0] == pytest.approx(times[2.0][:1].repeat(3))
    assert 1 <= times[2.0][0] / times[3.0][0] <= middle
    assert times[0.0] == pytest.approx([times[float(runs)][0], times[3.0][0], times[2.0][0]])


def test_the_interval_holds_published_ratios_and_determinism_makes_the_gradient_longer():
    table = load_tensor_tables().attention["h100-sxm"]
    older, gradient = (
        table.spread(attention_columns(make_operators(make_operator(name)), True))
        for name in (FLASH, FLASH + "_backward")
    )
    assert older[0][0] < table.low_log and older[1][0] > table.high_log
    assert gradient[0][0] < older[0][0] and gradient[1][0] > older[1][0]
    operators = make_operators(make_operator(), make_operator(FLASH + "_backward"))
    plain, fixed = (
        table.predict(pd.DataFrame({"flop": operators["flop"] * shape["attention_share"]}).assign(**shape))
        for shape in (attention_columns(operators, True, 0.0, word) for word in (False, True))
    )
    assert fixed / plain == pytest.approx([1, DETERMINISTIC])


@pytest.fixture(scope="module")
def models():
    return load_shipped_models()


def test_a_step_in_bf16_takes_the_tables_attention(models):
    operators = make_operators(make_operator(), make_operator(FLASH + "_backward"))
    for device in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA H200"):
        name = {"NVIDIA H100 80GB HBM3": "h100-sxm", "NVIDIA H200": "h200"}.get(device, "a100-sxm4-80gb")
        causal = choose_operator_model(models, device, "bf16", True, True).model
        found = causal.predict(operators)
        sheet, alone_s = load_device(name), time_s(load_tensor_tables().attention[name])
        # Computing takes longer in a step than in the table's loop.
        flop = operators["flop"] * attention_columns(operators, True)["attention_share"]
        more_s = sustained_more(sheet) * flop / sheet.peak("bf16")
        expected = np.array([alone_s, BACKWARD_RATIO * alone_s]) + more_s
        assert found["time_s"].to_numpy() == pytest.approx(expected.to_numpy())
        assert found["extrapolated"].tolist() == [False, True], "no table holds a gradient"
        unknown = choose_operator_model(models, device, "bf16", True).model.predict(operators)
        assert unknown["high_s"].iloc[0] > 1.9 * unknown["time_s"].iloc[0], "nobody says the mask"
        full = choose_operator_model(models, device, "bf16", True, False).model.predict(operators)
        assert 1.5 < full["time_s"].iloc[0] / found["time_s"].iloc[0] < 2


def test_attention_is_resized_with_its_heads(models):
    model = choose_operator_model(models, "NVIDIA H100 80GB HBM3", "bf16", True, True).model
    operators = make_operators(make_operator(), make_operator(FLASH + "_backward"))
    operators["device_ns"] = (model.predict(operators)["time_s"] * 1e9).round().astype(int)
    quarter = make_operators(make_operator(batch=1), make_operator(FLASH + "_backward", batch=1))
    target = operators.assign(**{name: quarter[name] for name in ("flop", "read_bytes", "write_bytes")})
    found = model.rescale(operators, target)["time_s"].to_numpy()
    assert found == pytest.approx(model.predict(quarter)["time_s"].to_numpy(), rel=0.02)


def test_whether_attention_is_causal_is_read_from_the_capture_or_the_workload():
    trace = load_trace("gpt2-b8")
    trace.facts = replace(trace.facts, row={"causal": "True"})
    assert find_mask(trace) is True
    trace.facts = replace(trace.facts, causal_attention=False)
    assert find_mask(trace) is False
    trace.facts = replace(trace.facts, causal_attention=None, row={"causal": "None"})
    assert find_mask(trace) is None


def test_without_a_table_nothing_is_fitted(tmp_path):
    with pytest.raises(InputError, match="no table of fused attention"):
        fit_attention(tmp_path)
    assert np.all([table.rows > 1000 for table in load_tensor_tables().attention.values()])
