"""Models that several tests of traces build."""

import pytest


@pytest.fixture
def tiny_models(monkeypatch):
    """Published models but for their sizes, so that a step takes milliseconds."""
    pytest.importorskip("transformers", reason="the models come from transformers")
    from trioflow.trace.workloads.build import MODELS, PublishedModel

    t5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2}
    bert = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    gpt2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    tiny = {
        "tiny-t5": PublishedModel("t5", t5),
        "tiny-flan": PublishedModel("t5", {**t5, "feed_forward_proj": "gated-gelu"}, tied=False),
        "tiny-gpt2": PublishedModel("gpt2", gpt2),
        "tiny-bert": PublishedModel("bert", bert),
        "tiny-llama": PublishedModel("llama", {**bert, "num_key_value_heads": 2}),
    }
    for name, published in tiny.items():
        monkeypatch.setitem(MODELS, name, published)
