"""PEFT's own fine-tuning runs on one L40S: trained parameters, peaks and times of the methods that adapters are."""

import json
import os
import statistics

import pytest
from trioflow import make_plan, predict
from trioflow.datasets.catalogue import load_catalogue
from trioflow.hardware.device_sheet import list_devices

pytest.importorskip("torch", reason="a trace without a device needs torch (extra [capture])")

MLP = {"lora": 10, "lora_targets": "gate,up,down"}
RUNS = {
    "full-finetuning--llama-3.2-3B-lr_0.00001": {},
    "ln_tuning--llama-3.2-3B-default": {"freeze": "*.embed_tokens,*_proj"},
    "lora--llama-3.2-3B-rank10-target-mlp": MLP,
    "lora--llama-3.2-3B-rank32": {"lora": 32},
    "lora--llama-3.2-3B-rank32-lorafa": {"lora": 32, "freeze": "*.lora_A"},
    "lora--llama-3.2-3B-rank32-mica": {"lora": 32, "freeze": "*.lora_B"},
    "lora--llama-3.2-3B-rank64": {"lora": 64},
    "lora--llama-3.2-3B-rank64-rslora": {"lora": 64},
}
"""Runs whose network is one of ours, and what it is called here. The embedding is the head too."""
LONGEST, MEAN = 768, 210


@pytest.mark.slow
def test_peft_s_runs_take_the_memory_and_time_predicted(tmp_path):
    folder = os.environ.get("TRIOFLOW_DATA_MIRROR")
    files = load_catalogue().held_files(folder, ["peft/runs"]) if folder else []
    if len(files) < len(RUNS):
        pytest.skip("the public data is not at hand")
    sheet = "l40s" if "l40s" in list_devices() else "l4"  # peaks are the same on any
    rate = "{{value: {}, source: one GPU sends nothing}}".format
    links = f"builder: switch, bandwidth_bytes_per_s: {rate('25.0e9')}, latency_s: {rate('5.0e-6')}"
    platform = tmp_path / "box.yaml"
    platform.write_text(
        f"name: box\ndevice: {{sheet: {sheet}}}\nranks: 1\ntopology: {{{links}}}\n"
        "communication_on_compute_stream: false\n"
    )
    peaks, times = [], []
    for file in files:
        run, words = json.loads(file.read_text())["train_info"], RUNS[file.stem]
        asked = {"batch": 4, "precision": "pure-bf16", "interval": False, **words}
        longest, mean = (
            predict("llama-3.2-3b", make_plan(), platform, sequence=n, **asked).to_dict()
            for n in (LONGEST, MEAN)
        )
        if words:
            assert longest["trained_parameters"] == run["num_trainable_params"]
        step_s = (
            statistics.median(m["train time"] for m in run["metrics"] if "train time" in m) / 250
        )
        assert longest["fit_probability"] > 0.9, "it ran on that card"
        peaks.append(
            abs(longest["memory"][0]["reserved_bytes"] / run["accelerator_memory_max"] - 1)
        )
        times.append(abs(mean["step_time_s"] / step_s - 1))
    assert statistics.median(peaks) < 0.08 and max(peaks) < 0.12
    if sheet == "l40s":
        assert statistics.median(times) < 0.2
