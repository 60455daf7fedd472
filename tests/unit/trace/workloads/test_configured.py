"""Networks given by their ``config.json``: transformers' own defaults, which are those of the first published ones."""

import json
from math import prod

import pytest
from same_step import assert_same_step
from trioflow.base.errors import InputError
from trioflow.prediction.assembly import predict
from trioflow.trace.store import load_trace

transformers = pytest.importorskip("transformers", reason="networks come from transformers")
meta = pytest.importorskip("trioflow.trace.capture.meta", reason="capture needs torch")

TEXT = {"sequence": 64}
ANSWERED = {  # parameters in millions, as transformers counts them, and the stacks that are repeated
    "bert": (109.5, 1),
    "roberta": (124.7, 1),
    "distilbert": (67.0, 1),
    "electra": (13.5, 1),
    "deberta-v2": (880.0, 1),
    "albert": (206.4, 0),
    "mpnet": (109.5, 1),
    "modernbert": (149.7, 1),
    "t5": (60.5, 2),
    "mt5": (172.1, 2),
    "bart": (406.3, 2),
    "whisper": (37.8, 2),
    "speech_to_text": (29.5, 2),
    "wav2vec2": (94.4, 0),
    "vit": (85.8, 1),
    "beit": (85.7, 1),
    "swin": (27.5, 0),
    "convnext": (27.8, 1),
    "resnet": (23.5, 0),
    "dinov2": (85.7, 0),
    "segformer": (3.3, 0),
    "clip": (151.3, 2),
    "siglip": (203.2, 2),
    "blip": (224.0, 2),
    "vit_mae": (111.9, 2),
    "gemma3": (2628.7, 1),
    "gpt_neox": (20554.6, 1),
    "opt": (125.2, 1),
    "falcon": (6921.7, 1),
    "qwen2_vl": (71460.5, 1),
}

WINDOWED = {  # a window that cuts the image is no mask: these blocks do less than those without
    "num_hidden_layers": 6,
    "window_size": 7,
    "window_block_indices": [0, 1, 3, 4],
    "out_features": ["stage6"],
    "out_indices": [6],
}


def write(folder, kind, **changes):
    content = transformers.AutoConfig.for_model(kind).to_dict() | changes
    path = folder / f"{kind}.json"
    path.write_text(json.dumps({name: value for name, value in content.items() if name != "dtype"}))
    return path


@pytest.fixture(autouse=True)
def kept_here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", ANSWERED)
def test_a_network_is_built_from_its_configuration(kind, tmp_path):
    step = {"wav2vec2": {"sequence": 16_000}, "vit_mae": {}}.get(kind, TEXT)
    trace = load_trace(write(tmp_path, kind), precision="fsdp2-mixed", **step)
    millions, stacks = ANSWERED[kind]
    facts = trace.facts
    assert sum(prod(p["shape"]) for p in facts.parameters) / 1e6 == pytest.approx(millions, abs=0.05)
    assert len(facts.repeated or []) >= stacks
    assert {"forward", "backward", "optimizer"} == set(trace.operators["phase"])
    assert facts.step_time_s == 0


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 4), ("fsdp2-mixed", 2)])
def test_products_of_all_experts_at_once_are_read_in_any_precision(precision, width, tmp_path):
    """Autocast leaves them in their weights' type: 16 tokens to 8 experts each, of which 64 weights are read."""
    file = write(tmp_path, "olmoe", num_hidden_layers=1)
    operators = load_trace(file, precision=precision, sequence=16).operators
    first = operators[operators["name"] == "aten::_grouped_mm"].iloc[0]
    rows, hidden, inner = 16 * 8, 2048, 2 * 2048
    assert first["flop"] == 2 * rows * hidden * inner
    assert first["read_bytes"] == pytest.approx(width * (rows * hidden + 64 * hidden * inner), rel=1e-4)


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_any_plan_takes_a_network_as_it_is_by_default(plan, tmp_path):
    """Under autocast, each GPU its part of the batch at once; fully_shard's own recipe would refuse DDP."""
    found = predict(write(tmp_path, "bert", num_hidden_layers=4), plan, "dgx-a100", ranks=8, batch=64, sequence=16)
    assert found.step.trace.facts.precision == "bf16"
    assert (found.task_graph.metadata.plan.accumulate, found.step.trace.facts.batch) == (1, 8)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("whisper", {"encoder_layers": 5, "decoder_layers": 4}), ("vit", {"num_hidden_layers": 5}), ("vitdet", WINDOWED)],
)
def test_blocks_that_stand_for_others_are_as_all_of_them(kind, changes, tmp_path):
    row = {"workload": kind, "family": "configured", "model": kind, "sequence": 16, "optimizer": "sgd-fused"}
    row["config"] = write(tmp_path, kind, **changes).read_text()
    assert_same_step(meta.capture_meta(row, 2), meta.capture_meta(row | {"whole": True}, 2))


@pytest.mark.parametrize(
    ("content", "step", "message"),
    [
        ({"model_type": "bertt"}, {}, "knows no model_type 'bertt'; did you mean bert?"),
        ({"model_type": "bert"}, {"sequence": 513}, "does not run on inputs of the sizes in its configuration"),
        (
            {"model_type": "bert", "num_attention_heads": 7},
            TEXT,
            "cannot build BertForMaskedLM from this configuration",
        ),
        ({"model_type": "bert", "hidden_size": "wide"}, TEXT, "config.json"),
        ({"model_type": "videomae"}, {}, "trains on masked patches"),
        ({"model_type": "clap"}, TEXT, "whose shape config.json does not give"),
        ({"model_type": "mamba", "num_hidden_layers": 4}, {"sequence": 256}, "it loops over tokens"),
        ({"model_type": "bert"}, TEXT | {"attention": "flash"}, "--attention: bert is built as its library writes it"),
        ({"_class_name": "UNet2DConditionModel"}, {}, "pip install diffusers"),
    ],
)
def test_what_cannot_be_built_says_why(content, step, message, tmp_path, monkeypatch):
    monkeypatch.setattr(meta, "_MOST_CALLS", 5000)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as refused:
        load_trace(path, **step)
    assert message in str(refused.value)
    assert "config.json" in str(refused.value)
