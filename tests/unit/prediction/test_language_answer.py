import json

import numpy as np
import pytest
from trioflow.base.errors import InputError
from trioflow.cli.main import main
from trioflow.parallel.plan import make_plan
from trioflow.parallel.task_graph import Fold
from trioflow.prediction.assembly import predict
from trioflow.prediction.breakdown import describe_run, name_group
from trioflow.trace.language.sizes import read_language_model

pytest.importorskip("torch", reason="a trace without a device needs torch (extra [capture])")

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
PLAN = make_plan(data=2, tensor=2, pipeline=2, schedule="1f1b", micro_batches=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def prediction(folder):
    return predict(folder, PLAN, "dgx-h100", sequence=128, precision="megatron-bf16", interval=False)


def test_a_model_stands_for_the_trace_of_the_micro_batch_that_the_plan_runs(folder, prediction):
    assert prediction.task_graph.metadata.batch == 8  # one sample a micro-batch
    larger = predict(folder, PLAN, "dgx-h100", batch=16, sequence=128, interval=False)
    assert larger.step.traces[0].facts.batch == 2
    for mode, samples in (("forward", 8), ("train", 1)):
        asked = predict(folder, "single", "dgx-h100", ranks=1, batch=8, mode=mode, sequence=128, interval=False)
        assert asked.step.traces[0].facts.batch == samples, "a forward pass runs its batch at once"
    with pytest.raises(InputError, match="sequence of a trace that was captured"):
        predict("gpt2-tiny-b8", make_plan(), "dgx-h100", sequence=128)


def test_rates_follow_from_the_step_time_and_the_sizes(prediction):
    told = prediction.to_dict()
    model, sequence = read_language_model(prediction.step.traces[0].facts)
    assert told["tokens_per_step"] == 8 * 128
    assert told["tokens_per_s"] == pytest.approx(8 * 128 / prediction.step_time_s)
    assert told["tokens_per_s_per_gpu"] == pytest.approx(told["tokens_per_s"] / 8)
    peak = prediction.step.platform.device.peak_flop_per_s["bf16"]
    flop = 6 * model.parameters + 12 * 4 * 256 * sequence
    assert told["mfu"] == pytest.approx(told["tokens_per_s_per_gpu"] * flop / peak)
    less = 6 * 2 * 1024 * 256 * told["tokens_per_s_per_gpu"] / peak
    assert told["mfu"] - told["mfu_without_embeddings"] == pytest.approx(less)
    assert (told["precision"], told["attention"]) == ("megatron-bf16", "cudnn")


def test_waits_are_told_apart_by_the_degree_that_communicates(prediction):
    told = prediction.to_dict()
    assert set(told["exposed_by_group_s"]) == {"data", "tensor", "pipeline"}
    assert max(told["exposed_by_group_s"].values()) <= prediction.exposed_communication_s * 1.5
    by_rank = prediction.breakdown("rank")
    idle = (by_rank["idle_s"] * by_rank["ranks"]).sum() / by_rank["ranks"].sum()
    assert told["bubble_share"] + told["host_share"] == pytest.approx(idle / prediction.step_time_s)
    assert told["bubble_share"] > 0


def test_a_device_that_waits_for_launches_is_no_bubble(prediction):
    """A small model's hosts decide: what a rank idles while its own host launches is the host's."""
    told, timeline = prediction.to_dict(), prediction.timeline
    mine = timeline[timeline["rank"] == 0]
    launches_s = mine.loc[mine["kind"] == "host", ["start_s", "end_s"]].to_numpy()
    work_s = mine.loc[mine["kind"] != "host", ["start_s", "end_s"]].to_numpy()
    moments = np.linspace(0, prediction.step_time_s, 20_001)[:-1]

    def inside(spans):
        return ((spans[:, :1] <= moments) & (moments < spans[:, 1:])).any(axis=0)

    host = (inside(launches_s) & ~inside(work_s)).mean()
    assert host > 0.3
    assert told["host_share"] == pytest.approx(host, abs=0.1), "the mean over ranks; this one's beside it"


def test_an_optimizer_on_the_host_is_no_kernel_launch(folder):
    words = {"sequence": 128, "precision": "fsdp2-mixed", "interval": False}
    here, there = (
        predict(folder, "fsdp", "dgx-h100", ranks=4, offload=where, **words) for where in ("none", "optimizer")
    )
    update = there.timeline.query("rank == 0 and name == 'optimizer on the host'").iloc[0]
    told = there.to_dict()
    assert told["host_update_share"] * there.step_time_s == pytest.approx(update["end_s"] - update["start_s"])
    assert told["host_share"] < 1.1 * here.to_dict()["host_share"]
    assert there.parts_s["optimizer on the host"] == pytest.approx(told["host_update_share"] * there.step_time_s)
    assert sum(there.parts_s.values()) == pytest.approx(there.step_time_s)


def test_waits_need_no_table_of_all_ranks(folder, prediction, monkeypatch):
    every = predict(folder, PLAN, "dgx-h100", sequence=128, precision="megatron-bf16", interval=False, fold=False)
    assert not every.to_dict()["folded"]
    once = predict(folder, PLAN, "dgx-h100", sequence=128, precision="megatron-bf16", interval=False)

    def expand(fold):
        raise AssertionError("the tasks of all ranks were made")

    monkeypatch.setattr(Fold, "expand", expand)
    told = once.to_dict()
    assert told["folded"]
    for key in ("bubble_share", "host_share", "exposed_by_group_s"):
        assert told[key] == every.to_dict()[key]


@pytest.mark.parametrize(
    ("group", "degree"),
    [
        ("0,1", "tensor"),
        ("0,2", "data"),
        ("1,3", "data"),
        ("0,4", "pipeline"),
        ("1,0", "tensor"),
        ("3,1", "data"),
        ("4,0", "pipeline"),
    ],
)
def test_groups_are_named_by_their_stride(group, degree):
    assert name_group(group, PLAN) == degree


def test_a_run_of_many_tokens_has_hours_cost_and_energy():
    told = {"tokens_per_s": 1e6, "ranks": 64}
    run = describe_run(told, 3.6e12, 2.0, 700.0)
    assert run["time_s"] == 3.6e6
    assert run["gpu_hours"] == 64_000
    assert run["cost"] == 128_000
    assert run["energy_j"] == 64_000 * 3600 * 700
    assert describe_run(told, None, 2.0, 700.0, budget=128_000) == {**run, "budget": 128_000}
    with pytest.raises(InputError, match="--tokens needs a language model"):
        describe_run({"ranks": 1}, 1e9, None, None)
    for tokens, price in ((1e9, 2.0), (None, None), (None, 0.0)):
        with pytest.raises(InputError, match="--budget needs a price"):
            describe_run(told, tokens, price, None, budget=1e6)


def test_the_command_answers_in_the_units_of_the_field(folder, capsys):
    words = ["--sequence", "128", "--precision", "pure-bf16", "--platform", "dgx-h100"]
    assert main(["simulate", str(folder), *words, "--plan", "fsdp", "--ranks", "8", "--tokens", "1e9"]) == 0
    shown = capsys.readouterr().out
    for text in ("tokens/s", "MFU", "model TFLOP/s", "pure-bf16", "flash attention", "GPU-hours", "700 W"):
        assert text in shown
    assert main(["show", str(folder), "--sequence", "128", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["language_model"]["hidden"] == 256


@pytest.mark.parametrize(
    "plan",
    [make_plan(data=4), make_plan(data=4, sharding="distributed"), make_plan(data=4, sharding="fsdp")],
    ids=["ddp", "distributed", "fsdp"],
)
def test_gradients_are_exchanged_and_weights_gathered_in_the_formats_of_the_recipe(folder, plan):
    moved = {}
    for name in ("pure-bf16", "megatron-bf16"):
        made = predict(folder, plan, "dgx-h100", sequence=64, precision=name, interval=False)
        tasks = made.task_graph.tasks
        mine = tasks[(tasks["kind"] == "collective") & (tasks["rank"] == 0)]
        moved[name] = mine.groupby("name", observed=True)["message_bytes"].sum().to_dict()
    for collective, size in moved["pure-bf16"].items():
        doubled = 1 if collective == "all_gather" else 2
        assert moved["megatron-bf16"][collective] == pytest.approx(doubled * size, rel=0.01)
    assert moved["pure-bf16"]
