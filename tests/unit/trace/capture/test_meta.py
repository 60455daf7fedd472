import resource
from dataclasses import asdict
from math import prod

import pytest
from captured import BATCH, TRANSFORMER, capture_raw
from same_step import assert_same_step, category_bytes
from trioflow.base.errors import InputError
from trioflow.base.experiments import load_workloads
from trioflow.trace.profile.merge import merge_trace
from trioflow.trace.repeat import repeat_layers
from trioflow.trace.store import load_trace, save_trace
from trioflow.trace.workloads.catalog import CATALOG

pytest.importorskip("torch", reason="capture needs torch (extra [capture])")

from trioflow.trace.capture.meta import capture_meta

SMALL = {"layers": 2, "sequence": 8, "optimizer": "sgd-fused"}


def catalog_row(name):
    return asdict(load_workloads(CATALOG)[name])


def captured(row, folder, batch=BATCH):
    return merge_trace(capture_raw(row, folder, batch))


@pytest.mark.parametrize("name", ["transformer_trace", "bert_trace", "cnn_trace"])
def test_fake_tensors_run_what_a_cpu_runs(name, request):
    real = request.getfixturevalue(name)
    made = capture_meta(real.facts.row, BATCH, target="cpu")
    assert_same_step(made, real)
    assert category_bytes(made) == category_bytes(real)
    assert made.facts.row == real.facts.row


@pytest.mark.parametrize(
    "row",
    [{**TRANSFORMER, "optimizer": "adamw-foreach"}, {**TRANSFORMER, "optimizer": "sgd-fused", "precision": "bf16"}],
    ids=["foreach", "bf16-fused"],
)
def test_so_they_do_with_lists_and_casts(row, tmp_path):
    made = capture_meta(row, BATCH, target="cpu")
    assert_same_step(made, captured(row, tmp_path))
    assert made.facts.warnings == []


def test_gradients_of_a_shared_weight_are_added_as_on_a_cpu(tiny_models, tmp_path):
    row = {**catalog_row("gpt2"), **SMALL, "model": "tiny-gpt2"}
    made = capture_meta(row, 2, target="cpu")
    real = captured(row, tmp_path, 2)
    # The head's gradient is a view, which autograd does not write into; those inside blocks are not.
    adds = real.operators[real.operators["name"].isin(["aten::add", "aten::add_"])]
    assert {"aten::add", "aten::add_"} == set(adds[adds["phase"] == "backward"]["name"])
    assert_same_step(made, real)


@pytest.mark.slow
def test_an_encoder_and_a_decoder_are_repeated_together():
    pytest.importorskip("transformers", reason="the model comes from transformers")
    row = {**catalog_row("t5-small"), **SMALL}
    made = repeat_layers(capture_meta({**row, "layers": 4}, 2, target="cpu"), 5)
    assert_same_step(made, capture_meta({**row, "layers": 5}, 2, target="cpu"))
    assert made.facts.repeated == [{"block": "encoder.block.2", "copies": 2}, {"block": "decoder.block.2", "copies": 2}]


@pytest.mark.slow
def test_one_block_is_enough_where_all_are_alike():
    pytest.importorskip("transformers", reason="the model comes from transformers")
    row = {**catalog_row("llama-3-2-1b"), **SMALL}
    made = repeat_layers(capture_meta({**row, "layers": 1}, 2, target="cpu"), 2)
    assert_same_step(made, capture_meta(row, 2, target="cpu"))


def test_there_are_no_times(tmp_path):
    made = capture_meta(TRANSFORMER, BATCH, target="cpu")
    assert not made.operators[["start_ns", "device_ns", "cpu_ns"]].to_numpy().any()
    facts = made.facts
    assert (facts.device, facts.device_name) == ("meta", "none")
    assert (facts.step_time_s, facts.step_time_source) == (0.0, "none")
    assert facts.tail_s == 0.0 and facts.step_times_s == [] and facts.warnings == []
    save_trace(made, tmp_path)
    assert load_trace(tmp_path).facts == facts


def test_the_same_row_gives_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        save_trace(capture_meta(TRANSFORMER, BATCH, target="cpu"), tmp_path / name)
    for file in ("operators.parquet", "tensors.parquet", "trace.json"):
        one, two = ((tmp_path / name / file).read_bytes() for name in ("one", "two"))
        assert one == two, file


def test_a_number_asked_of_a_tensor_is_counted():
    made = capture_meta({**TRANSFORMER, "precision": "fp16"}, BATCH, target="cpu")
    assert any("asked tensors for" in warning for warning in made.facts.warnings)


@pytest.mark.parametrize(
    ("workload", "published"),
    # T. Brown et al., arXiv 2005.14165, table 2.1; D. Narayanan et al., arXiv 2104.04473, table 1.
    [("gpt3-175b", 175.0e9), ("gpt-145b", 145.6e9)],
)
def test_the_largest_models_take_no_memory(workload, published):
    row = catalog_row(workload)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = repeat_layers(capture_meta({**row, "layers": 2}, 1), int(row["layers"]))
    grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib)
    assert grown_bytes < 1e9  # two layers' weights alone are 19 GB
    h, layers, s, v = (int(row[k]) for k in ("hidden", "layers", "sequence", "vocabulary"))
    parameters = sum(prod(p["shape"]) for p in made.facts.parameters)
    assert parameters == pytest.approx(published, rel=0.01)
    # 12 L h^2 of weights, 13 L h of biases and norms, position and token embedding, last norm;
    # unlike the published models' the head is not tied to the embedding: v h more.
    assert parameters == 12 * layers * h**2 + 13 * layers * h + (v + s) * h + 2 * h + v * h
    assert sum(g["size_bytes"] for g in made.facts.gradients) == 4 * parameters
    assert len(made.facts.units) == layers + 2
    # Forward: 24 s h^2 a layer of matrix products, 4 s^2 h of attention, 2 s h v of the head;
    # backward twice as much, and the fused attention computes its scores again: 2 s^2 h a layer.
    closed = 72 * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert made.facts.flop == round(closed) + 2 * s**2 * h * layers
    assert made.operators["forward_op_id"].notna().sum() == made.facts.other["backward_operators_joined"]


def test_what_cannot_run_without_values_is_refused(tmp_path, monkeypatch):
    (tmp_path / "picky.py").write_text(
        "import torch\n"
        "class Picky(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x[x.sum(1) > 0])\n"
        "class Task:\n"
        "    model = Picky(4, 4)\n"
        "    def make_batch(self, batch, seed, device):\n"
        "        return torch.randn(batch, 4, device=device), torch.zeros(1, device=device)\n"
        "    def loss(self, outputs, targets):\n"
        "        return outputs.sum() + targets.sum()\n"
    )
    monkeypatch.chdir(tmp_path)
    row = {"workload": "picky", "family": "user", "model": "picky:Task", "optimizer": "sgd", "precision": "fp32"}
    with pytest.raises(InputError, match=r"picky: .* does not run on tensors without values"):
        capture_meta(row, 4)


def test_an_empty_batch_is_refused():
    with pytest.raises(InputError, match="batch 0 is not positive"):
        capture_meta(TRANSFORMER, 0)


@pytest.fixture(scope="module")
def of_targets():
    """A small GPT-2 with its dropout, as a GPU and as a CPU run it."""
    pytest.importorskip("transformers", reason="the model comes from transformers")
    row = {**catalog_row("gpt2"), **SMALL, "optimizer": "adamw"}
    return {target: capture_meta(row, 2, target=target) for target in ("cuda", "cpu")}


def test_a_gpu_updates_lists_of_parameters_and_a_cpu_one_by_one(of_targets):
    names = {target: set(trace.operators.query("phase == 'optimizer'")["name"]) for target, trace in of_targets.items()}
    assert any(name.startswith("aten::_foreach_") for name in names["cuda"])
    assert not any(name.startswith("aten::_foreach_") for name in names["cpu"])
    assert {t: trace.facts.other["target"] for t, trace in of_targets.items()} == {"cuda": "cuda", "cpu": "cpu"}
    # What the row insists on stays.
    one = capture_meta({**TRANSFORMER, "optimizer": "adamw-fused"}, BATCH)
    assert "aten::_fused_adamw_" in set(one.operators["name"])


def test_a_gpu_fuses_attention_with_dropout(of_targets):
    kept = {target: set(trace.operators.query("phase == 'backward'")["name"]) for target, trace in of_targets.items()}
    fused = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    assert fused in kept["cuda"] and fused not in kept["cpu"]
    assert "aten::_softmax_backward_data" in kept["cpu"] - kept["cuda"]
    from torch.nn import functional

    assert functional.scaled_dot_product_attention.__module__ != "trioflow.trace.capture.meta"


def test_what_a_gpu_runs_is_the_default():
    with pytest.raises(InputError, match="unknown target 'tpu'; use cuda or cpu"):
        capture_meta(TRANSFORMER, BATCH, target="tpu")
    assert capture_meta(TRANSFORMER, BATCH).facts.other["target"] == "cuda"


def test_the_shipped_study_of_gpt2_is_what_a_gpu_runs():
    trace = load_trace("gpt2-b8")
    names = trace.operators.query("phase == 'optimizer'")["name"]
    assert trace.facts.other["target"] == "cuda" and any(n.startswith("aten::_foreach") for n in names)


def test_a_sum_hands_the_gradient_of_a_parameter_on(tmp_path, monkeypatch):
    (tmp_path / "gemma_like.py").write_text(
        "import torch\n"
        "class Sums(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(4, 4)\n"
        "        self.scale, self.place = (torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(2))\n"
        "    def forward(self, x):\n"
        "        return (super().forward(x) + self.place).exp() * (1 + self.scale)\n"
        "class Task:\n"
        "    model = Sums()\n"
        "    def make_batch(self, batch, seed, device):\n"
        "        return torch.randn(batch, 4, device=device), torch.zeros(1, device=device)\n"
        "    def loss(self, outputs, targets):\n"
        "        return outputs.sum() + targets.sum()\n"
    )
    monkeypatch.chdir(tmp_path)
    row = {"workload": "sums", "family": "user", "model": "gemma_like:Task", "optimizer": "sgd", "precision": "fp32"}
    made = capture_meta(row, 4)
    assert {one["name"] for one in made.facts.gradients} == {"weight", "bias", "scale", "place"}
    assert made.facts.warnings == []
