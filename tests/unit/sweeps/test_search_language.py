import json
from dataclasses import replace

import pytest
from few_facts import few_facts
from trioflow.base.errors import InputError, group_warnings
from trioflow.base.experiments import Plan
from trioflow.cli.main import main
from trioflow.cli.search import format_ranking
from trioflow.network.across_nodes import open_platform
from trioflow.prediction.assembly import predict
from trioflow.sweeps.description import PLAN_COLUMNS, fill_values, load_sweep, read_assumptions
from trioflow.sweeps.scenarios import PredictionCache
from trioflow.sweeps.search import search
from trioflow.sweeps.search_space import Space, choose_space

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("torch", reason="a trace without a device needs torch (extra [capture])")
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_every_row_is_what_predict_answers(folder):
    trace, step = str(folder), {"sequence": 128}
    rows = search(trace, 4, "dgx-h100", batch=32, top=4, **step)["ranking"]
    assert len({row["micro_batch_samples"] for row in rows}) > 1
    for row in rows:
        plan = Plan(plan="searched", **{name: row[name] for name in PLAN_COLUMNS})
        answer = predict(trace, plan, "dgx-h100", batch=32, **step).to_dict()
        same = set(row) & set(answer) - {"plan_text"}
        assert {"step_time_s", "low_s", "high_s", "peak_memory_bytes"} <= same
        assert {name: row[name] for name in same} == {name: answer[name] for name in same}


def test_recipes_are_ranked_together_and_named(folder, capsys):
    asked = {"batch": 4, "top": 1, "sequence": 128}
    recipes = ["fsdp2-mixed+compile", "megatron-bf16"]
    steps = [{"precision": "fsdp2-mixed", "fusion": "compile"}, {"precision": "megatron-bf16"}]
    alone = [search(str(folder), 2, "dgx-h100", **step, **asked) for step in steps]
    both = search(str(folder), 2, "dgx-h100", precision=", ".join(recipes), **asked)
    assert both["precisions"] == recipes and "precisions" not in alone[0]

    def times(answer):
        return {(row["precision"], row["plan_text"]): row["expected_s"] for row in answer["ranking"]}

    assert times(both) == times(alone[0]) | times(alone[1])
    order = [row["expected_s"] for row in both["ranking"]]
    assert order == sorted(order)
    assert both["plans"] == sum(one["plans"] for one in alone)
    assert both["ranking"][0]["first_faster_probability"] == 0.5
    assert both["first_beats_second"] == both["ranking"][1]["first_faster_probability"]
    one = search(str(folder), 2, "dgx-h100", precision=recipes[0], **asked)
    assert one.predict().step_time_s == one.best["step_time_s"]
    machine = open_platform("dgx-h100", 2)
    tight = replace(machine, device=machine.device.keep_free(1 - 1e-5))
    dropped = search(str(folder), 2, tight, precision=", ".join(recipes), **asked)["out_of_memory"]
    assert {entry["precision"] for entry in dropped} == set(recipes)
    head, _, *rows = format_ranking(both).splitlines()
    assert head.split()[:4] == ["plan", "precision,", "fusion", "step"]
    assert any("fsdp2-mixed, compile" in row for row in rows)
    assert any("megatron-bf16, gradients" in row for row in rows)
    words = ["search", str(folder), "--ranks", "2", "--platform", "dgx-h100", "--sequence", "128"]
    assert main([*words, "--precision", "fsdp2-mixed,none-such"]) == 2
    assert "none-such" in capsys.readouterr().err


@pytest.mark.slow
def test_plans_are_ranked_under_a_router_that_does_not_balance(tmp_path):
    sizes = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_hidden_layers": 2,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 4096,
        "vocab_size": 256,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    asked = {"batch": 8, "top": 30, "sequence": 4096, "precision": "megatron-bf16"}
    even, skewed = (
        {row["plan_text"]: row["expected_s"] for row in found["ranking"] if row["expert"] > 1}
        for found in (search(str(tmp_path), 2, "dgx-h100", routing=how, **asked) for how in ("balanced", "power:1.2"))
    )
    both = even.keys() & skewed.keys()
    assert both and all(skewed[plan] >= even[plan] for plan in both)
    assert any(skewed[plan] > even[plan] for plan in both)


def test_a_search_tells_how_far_it_is(folder):
    seen = []
    search(
        str(folder),
        2,
        "dgx-h100",
        batch=2,
        top=1,
        sequence=64,
        watch=lambda done, total, doing: seen.append((done, total, doing)),
    )
    estimated = [(done, total) for done, total, doing in seen if doing == "estimated"]
    assert [done for done, _ in estimated] == list(range(estimated[0][1]))
    assert any(doing.startswith("tried") for _, _, doing in seen)


def test_warnings_that_differ_in_their_numbers_are_one():
    told = group_warnings(["all_gather on 64 ranks: slow", "all_gather on 8 ranks: slow", "another"])
    assert told == ["all_gather on 64 ranks: slow (and 1 more like it)", "another"]


def test_other_models_are_searched_as_before():
    assert choose_space(few_facts(workload="resnet18")) == Space()


def test_scenarios_of_a_sweep_are_what_predict_answers(folder, tmp_path):
    asked = [
        {"sequence": 128, "precision": "fsdp2-mixed"},
        {"sequence": 256, "fusion": "compile", "mode": "forward-backward", "slow_ranks": [(1, 2.0)]},
        {
            "sequence": 128,
            "lora": 4,
            "inter_node_bandwidth": "12.5e9",
            "operator_scales": [("*mm", 0.5), ("*norm*", 2.0)],
        },
    ]
    same = {"trace": str(folder), "platform": "dgx-h100", "ranks": 16, "sharding": "fsdp", "batch": 32}
    rows = [
        {key: "; ".join(f"{a} {b}" for a, b in v) if isinstance(v, list) else v for key, v in one.items()}
        for one in asked
    ]
    file = tmp_path / "language.yaml"
    file.write_text(
        json.dumps({"description": "language models", "defaults": same, "list": [*rows, {"precision": "fp5"}]})
    )
    sweep, cache = load_sweep(file), PredictionCache()
    for number, step in enumerate(asked):
        row = cache.predict(number, sweep.scenarios[number])
        expected = predict(str(folder), "fsdp", "dgx-h100", ranks=16, batch=32, **step)
        names = ("step_time_s", "low_s", "high_s", "peak_memory_bytes")
        assert [row[name] for name in names] == [getattr(expected, name) for name in names] and row["status"] == "ok"
    assert "fp5" in cache.predict(3, sweep.scenarios[3])["reason"]
    with pytest.raises(InputError, match="semicolons between"):
        read_assumptions(fill_values({**same, "slow_ranks": "one twice"}))
