import json
from dataclasses import replace

import pytest
from trioflow.base.errors import InputError, TraceError
from trioflow.formats.megatron import parse_arguments, read_megatron
from trioflow.trace.language.read import TABLE, find_configuration, published_models, read_table, trace_of
from trioflow.trace.store import load_trace

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
MEGATRON = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --micro-batch-size: 4
  --global-batch-size: 32
  --seq-length: 1024
  --max-position-embeddings: 1024
  --vocab-file: ${DATA_PATH}/vocab.json
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 2
  --num-layers-per-virtual-pipeline-stage: 3
  --sequence-parallel: true
  --use-distributed-optimizer: true
  --recompute-granularity: selective
  --attention-backend: unfused
  --bf16: true
  --deterministic-mode: true
  --unheard-of: 3
"""
COMMAND = """#!/bin/bash
torchrun --nproc_per_node 8 pretrain_gpt.py \\
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \\
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm \\
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights \\
    --vocab-size 128256 --seq-length 8192 --max-position-embeddings 8192 \\
    --tensor-model-parallel-size 2 --hidden-dropout 0 --attention-dropout 0 --bf16
"""
NANOTRON = """
model:
  dtype: bfloat16
  model_config: {hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 16,
    num_attention_heads: 32, num_key_value_heads: 32, vocab_size: 131072, tie_word_embeddings: true}
parallelism: {dp: 4, tp: 2, pp: 2, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER}
tokens: {sequence_length: 4096, micro_batch_size: 2, batch_accumulation_per_replica: 8}
optimizer: {zero_stage: 1, accumulate_grad_in_fp32: true}
"""


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("row", read_table(TABLE), ids=lambda row: row["name"])
def test_models_by_name_have_as_many_parameters_as_published(row):
    model = published_models()[row["name"]]
    within = float(row["published_within"])
    assert model.parameters == pytest.approx(int(row["published_parameters"]), rel=within, abs=0)
    assert row["source"]


@pytest.mark.parametrize(
    ("given", "name"),
    [("meta-llama/Llama-2-7b-hf", "llama-2-7b"), ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"), ("GPT2_XL", "gpt2-xl")],
)
def test_a_name_is_known_with_the_marks_of_a_repository(given, name):
    assert find_configuration(given).model == published_models()[name]


def test_a_misspelt_name_is_asked_back_whatever_else_is_asked():
    with pytest.raises(TraceError, match=r"no language model is known.*did you mean llama-3.1-8b"):
        load_trace("llama-3.1-9b", sequence=64, precision="bf16")


def test_what_of_a_model_by_name_is_not_built_is_said():
    assert "multi-token prediction" in find_configuration("deepseek-ai/DeepSeek-V3").notes[0]
    assert not find_configuration("deepseek-v2").notes


def test_a_norm_without_biases_has_a_parameter_a_channel():
    mpt = published_models()["mpt-7b"]
    assert mpt.parameters - replace(mpt, norm="rms").parameters == 0
    assert replace(mpt, norm="layer").parameters - mpt.parameters == (2 * mpt.layers + 1) * mpt.hidden


@pytest.mark.parametrize(
    ("kind", "fields", "name"),
    [
        (
            "gemma",
            {
                "num_hidden_layers": 18,
                "hidden_size": 2048,
                "num_attention_heads": 8,
                "num_key_value_heads": 1,
                "intermediate_size": 16384,
                "vocab_size": 256000,
            },
            "gemma-2b",
        ),
        (
            "phi3",
            {
                "num_hidden_layers": 40,
                "hidden_size": 5120,
                "num_attention_heads": 40,
                "num_key_value_heads": 10,
                "intermediate_size": 17920,
                "vocab_size": 100352,
            },
            "phi-4",
        ),
    ],
)
def test_gemma_and_phi_are_read_from_their_configuration(tmp_path, kind, fields, name):
    found = find_configuration(write(tmp_path, "config.json", {"model_type": kind, **fields}))
    assert replace(found.model, name=name) == published_models()[name]


def test_a_config_json_is_the_model_of_that_name(tmp_path):
    found = find_configuration(write(tmp_path, "config.json", LLAMA))
    named = published_models()["llama-3.1-8b"]
    assert found.model.parameters == named.parameters
    assert found.model.flop_per_token(8192) == named.flop_per_token(8192)
    assert not found.notes
    # The folder of a checkpoint serves as well.
    assert find_configuration(tmp_path) == found


def test_experts_by_their_config_json(tmp_path):
    mixtral = LLAMA | {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    }
    found = find_configuration(write(tmp_path, "config.json", mixtral))
    named = published_models()["mixtral-8x7b"]
    assert found.model.parameters == named.parameters
    assert found.model.flop_per_token(8192) == named.flop_per_token(8192)
    assert not found.notes
    # A dense layer's width stands in the file too, and says nothing of the experts'.
    qwen = LLAMA | {
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "hidden_size": 2048,
        "head_dim": 128,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "vocab_size": 151936,
        "norm_topk_prob": True,
    }
    found = find_configuration(write(tmp_path, "config.json", qwen))
    assert found.model.parameters == published_models()["qwen3-30b-a3b"].parameters
    assert found.model.active_parameters == pytest.approx(3.3e9, rel=0.02)  # as its card says


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_group": 8,
    "topk_group": 4,
    "scoring_func": "sigmoid",
    "hidden_act": "silu",
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "swiglu_limit": 7.0,
}


@pytest.mark.parametrize(
    ("content", "name", "active"),
    [
        (DEEPSEEK, "deepseek-v3", 36.6e9),  # without the embedding, as its weights' README counts
        (GPT_OSS, "gpt-oss-20b", 3.61e9),  # likewise, as its model card does
        (GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}, "gpt-oss-120b", 5.13e9),
    ],
)
def test_latent_attention_and_windows_by_their_config_json(content, name, active, tmp_path):
    layers = int(content["num_hidden_layers"])
    if "layer_types" in content:
        content = content | {"layer_types": GPT_OSS["layer_types"][:2] * (layers // 2)}
    found = find_configuration(write(tmp_path, "config.json", content))
    assert replace(found.model, name=name) == published_models()[name]
    assert not found.notes
    model = found.model
    assert model.active_parameters - model.vocabulary * model.hidden == pytest.approx(active, rel=2e-3)


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq 2: blocks without experts among"),
        (DEEPSEEK, {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        (DEEPSEEK, {"first_k_dense_replace": 61}, "61 first blocks without experts, of 61"),
        (DEEPSEEK, {"first_k_dense_replace": "x"}, "'x' is not a whole number"),
        (DEEPSEEK, {"index_topk": 2048}, "attention that chooses its tokens is not built"),
        (GPT_OSS, {"layer_types": ["linear_attention"] * 24}, "are not 24 of sliding_attention and"),
        (GPT_OSS, {"layer_types": ["full_attention"] * 23}, "are not 24 of sliding_attention and"),
        (GPT_OSS, {"sliding_window": None}, "sliding_window is missing"),
    ],
)
def test_other_turns_of_blocks_are_refused(content, changes, message, tmp_path):
    with pytest.raises(InputError) as refused:
        find_configuration(write(tmp_path, "config.json", content | changes))
    assert message in str(refused.value)


def test_gpt2_by_its_config_json(tmp_path):
    path = write(
        tmp_path,
        "gpt2.json",
        {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257},
    )
    assert find_configuration(path).model.parameters == 124_439_808  # as published


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 8}, "num_local_experts 8: experts and latent attention of a llama"),
        ({"model_type": "mixtral", "num_experts": 4, "num_local_experts": 8}, "are one size, and differ"),
        ({"model_type": "mixtral", "num_experts": 4, "num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"num_attention_heads": 24}, "24 attention heads do not divide hidden_size 4096"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method: 'bitsandbytes' is not known here"),
        (
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 9},
            "9 experts a token cannot be chosen of 8",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
            "mlp_only_layers [1]: blocks without experts",
        ),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 2.5}, "2.5 is not a whole number"),
        ({"num_key_value_heads": 5}, "5 heads of keys and values do not divide 32"),
        ({"hidden_act": "tanh"}, "'tanh' is not known here"),
        ({"tie_word_embeddings": 3}, "3 is neither true nor false"),
    ],
)
def test_what_is_not_built_is_refused_by_its_name(changes, message, tmp_path):
    with pytest.raises(InputError) as refused:
        find_configuration(write(tmp_path, "config.json", LLAMA | changes))
    assert message in str(refused.value)
    assert "config.json" in str(refused.value)


def test_what_every_configuration_has_is_not_doubted(tmp_path):
    usual = {"architectures": ["LlamaForCausalLM"], "transformers_version": "4.43.0", "torch_dtype": "bfloat16"}
    assert find_configuration(write(tmp_path, "config.json", LLAMA | usual)).notes == ()


def test_fields_that_may_change_the_work_are_named(tmp_path):
    changes = {"sliding_window": 64, "logit_softcapping": 30.0, "num_key_value_head": 1, "model_type": "mistral"}
    found = find_configuration(write(tmp_path, "config.json", LLAMA | changes))
    notes = " ".join(found.notes)
    assert "logit_softcapping, num_key_value_head (did you mean num_key_value_heads?) may change" in notes
    for sequence in (64, 65):  # the window cuts nothing of what it holds
        warnings = trace_of(found, {"sequence": sequence}).facts.warnings
        assert any("sliding_window of 64" in warning for warning in warnings) == (sequence > 64)


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        ("--bf16", "megatron-bf16"),
        ("--bf16 --grad-reduce-in-bf16", "megatron-bf16-reduce"),
        ("--fp16", "megatron-fp16"),
        ("", "megatron-fp32"),
        ("--bf16 --fp8-format hybrid", "fp8-delayed"),
        ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise --grad-reduce-in-bf16", "fp8-bf16-reduce"),
        ("--bf16 --fp8-format e4m3 --fp8-recipe blockwise", "fp8-block"),
    ],
)
def test_megatron_arguments_say_in_what_gradients_are_reduced(words, recipe):
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 99"
    text = f"{sizes} --max-position-embeddings 32 {words}"
    assert read_megatron(parse_arguments(text, "x"), "x", "x").step["precision"] == recipe


def test_megatron_arguments_say_whether_there_are_cuda_graphs():
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 99"
    for words, found in (("", None), ("--enable-cuda-graph", True), ("--cuda-graph-impl local", True)):
        text = f"{sizes} --max-position-embeddings 32 {words}"
        assert read_megatron(parse_arguments(text, "x"), "x", "x").step.get("cuda_graphs") == found


def test_megatron_arguments_give_the_model_its_step_and_the_plan(tmp_path):
    found = find_configuration(write(tmp_path, "model_config.yaml", MEGATRON))
    model = found.model
    # 50,257 words padded to a multiple of 128 x tensor degree, tied, learned positions.
    assert (model.vocabulary, model.tied, model.longest) == (50432, True, 1024)
    assert model.feed_forward == 2048
    assert found.step == {
        "sequence": 1024,
        "batch": 4,
        "precision": "megatron-bf16",
        "attention": "fused-softmax",
        "fusion": "",
        "deterministic": True,
    }
    assert found.global_batch == 32
    assert found.degrees == {
        "tensor": 2,
        "pipeline": 2,
        "sequence_parallel": True,
        "vocabulary_parallel": True,
        "schedule": "interleaved",
        "stages_per_rank": 2,
        "sharding": "distributed",
        "recompute": "selective",
        "tensor_overlap": "backward",
    }
    assert found.notes == (
        "not followed: --overlap-grad-reduce left out (gradients are reduced beside backward)",
        "not followed: --unheard-of 3 (nobody here knows them, and they may change the work)",
    )
    other = MEGATRON.replace("--recompute-granularity: selective", "--recompute-activations: true")
    same = find_configuration(write(tmp_path, "other.yaml", other))
    assert (same.degrees, same.notes) == (found.degrees, found.notes)


@pytest.mark.parametrize(
    ("arguments", "stages"),
    [
        ("", (3, 3, 3, 3)),
        (
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3 --pipeline-model-parallel-size 2",
            (2,) * 6,
        ),
        (
            "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2 --pipeline-model-parallel-size 4",
            (2, 4, 4, 2),
        ),
        (
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
            "--num-layers 10 --pipeline-model-parallel-size 4",
            (2, 3, 3, 2),
        ),
        ("--pipeline-model-parallel-size 1", ()),
    ],
)
def test_stages_are_cut_as_megatron_cuts_them(arguments, stages, tmp_path):
    line = "--num-layers 12 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --pipeline-model-parallel-size 4 "
    found = find_configuration(write(tmp_path, "run.sh", line + arguments))
    assert found.stages == stages
    named = found.name_stages()
    assert (
        named is None
        if not stages
        else list(map(len, named)) == [n + (i == 0) + (i == len(stages) - 1) for i, n in enumerate(stages)]
    )


LAYOUT = (
    "--num-layers 15 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    " --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout '{}'"
)


def test_a_layout_says_the_blocks_of_each_stage(tmp_path):
    found = find_configuration(write(tmp_path, "run.sh", LAYOUT.format("Et*3|(tt|)*5t,t|L")))
    assert found.degrees["stages_per_rank"] == 2 and found.degrees["schedule"] == "interleaved"
    assert found.stages == (3, 2, 2, 2, 2, 2, 2, 0)
    stages = found.name_stages()
    assert (len(stages[0]), len(stages[-1])) == (4, 1)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Et*3|(tt|)*6L", "15 layers on 8 stages"),  # a fine one, of another depth below
        ("Et*3|tt|L", "5 layers on 3 stages"),
        ("tE|L", "is no layout from embedding"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout, message, tmp_path):
    line = LAYOUT.format(layout).replace("15", "16")
    with pytest.raises(InputError, match=message):
        find_configuration(write(tmp_path, "run.sh", line))


def test_multi_token_prediction_is_left_out_and_said(tmp_path):
    found = find_configuration(write(tmp_path, "run.sh", f"{EXPERTS} --mtp-num-layers 1"))
    assert "multi-token prediction" in found.notes[-1]


def test_blocks_that_cannot_be_cut_as_asked_are_refused(tmp_path):
    line = "--num-layers 12 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --pipeline-model-parallel-size 5"
    with pytest.raises(InputError, match=r"12 layers cannot be cut into 5 x 1 stages"):
        find_configuration(write(tmp_path, "run.sh", line))


EXPERTS = (
    (
        "--num-layers 61 --hidden-size 7168 --num-attention-heads 128 --seq-length 4096 --vocab-size 129280 --swiglu"
        " --make-vocab-size-divisible-by 1 --position-embedding-type rope --normalization RMSNorm --disable-bias-linear"
        " --untie-embeddings-and-output-weights --ffn-hidden-size 18432 --qk-layernorm --multi-latent-attention"
        " --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --bf16"
        " --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-layer-freq ([0]*3+[1]*58)"
        " --moe-shared-expert-intermediate-size 2048 --moe-token-dispatcher-type alltoall"
        " --pipeline-model-parallel-size 1 --expert-model-parallel-size 8 --tensor-model-parallel-size 2"
        " --sequence-parallel --hidden-dropout 0 --attention-dropout 0 --overlap-grad-reduce"
    )
    .replace("(", "'(")
    .replace(")", ")'")
)


def test_experts_and_latent_attention_by_megatron_s_arguments(tmp_path):
    found = find_configuration(write(tmp_path, "run.sh", EXPERTS))
    assert replace(found.model, name="deepseek-v3") == published_models()["deepseek-v3"]
    assert (found.degrees["expert"], found.degrees["tensor"]) == (8, 2)
    assert "expert_tensor" not in found.degrees and not found.notes
    whole = find_configuration(write(tmp_path, "whole.sh", f"{EXPERTS} --expert-tensor-parallel-size 1"))
    assert whole.degrees["expert_tensor"] == 1
    gathered = find_configuration(write(tmp_path, "other.sh", EXPERTS.replace("alltoall", "allgather")))
    assert "tokens travel in all-to-alls" in gathered.notes[0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[0]*3+[1]*58", "[0,1]*30+[1]", "blocks without experts are built as the first ones"),
        ("[0]*3+[1]*58", "[0]*3+[1]*57", "as the first ones alone, of 61"),
        ("[0]*3+[1]*58", "2", "blocks without experts are built as the first ones"),
        ("--bf16", "--moe-expert-capacity-factor 1.5", "experts that drop tokens"),
        ("--kv-lora-rank 512", "", "kv-lora-rank is missing"),
        ("--bf16", "--mtp-num-layers 1 --use-megatron-fsdp", "Megatron-FSDP|multi-token"),
    ],
)
def test_experts_that_are_not_built_are_refused(old, new, message, tmp_path):
    with pytest.raises(InputError) as refused:
        find_configuration(write(tmp_path, "run.sh", EXPERTS.replace(old, new)))
    assert any(words in str(refused.value) for words in message.split("|"))


def test_a_bare_yes_refuses_what_is_not_built(tmp_path):
    line = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --is-hybrid-model"
    with pytest.raises(InputError, match="hybrid models"):
        find_configuration(write(tmp_path, "run.sh", line))
    other = line.replace("--is-hybrid-model", "--use-megatron-fsdp true")
    with pytest.raises(InputError, match="Megatron-FSDP"):
        find_configuration(write(tmp_path, "run.sh", other))


def test_a_megatron_command_line_is_read_from_a_script(tmp_path):
    found = find_configuration(write(tmp_path, "llama.sh", COMMAND))
    assert found.model.parameters == published_models()["llama-3.1-8b"].parameters
    assert found.degrees["tensor"] == 2
    assert found.step["sequence"] == 8192


def test_a_nanotron_file_gives_the_model_and_the_plan(tmp_path):
    found = find_configuration(write(tmp_path, "1b.yaml", NANOTRON))
    assert found.model.parameters == pytest.approx(1.34e9, rel=0.005)
    assert found.step == {"sequence": 4096, "batch": 2, "precision": "nanotron-bf16"}
    assert found.accumulate == 8
    assert found.degrees == {
        "data": 4,
        "tensor": 2,
        "pipeline": 2,
        "sequence_parallel": True,
        "schedule": "1f1b",
        "sharding": "distributed",
        "vocabulary_parallel": True,
    }


def test_another_file_is_no_configuration(tmp_path):
    with pytest.raises(InputError, match="no configuration of a language model"):
        find_configuration(write(tmp_path, "other.json", {"a": 1}))
    with pytest.raises(InputError, match="--num-layers is missing"):
        find_configuration(write(tmp_path, "run.sh", "echo hello"))
    assert find_configuration("no-such-model") is None
