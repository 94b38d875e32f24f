"""A model of one's own, from its config.json: the same facts as the table's, and errors that name file and key."""

import json
from pathlib import Path

import pytest

from rackplan.engine import MODELS, InputError, ModelSpec, check_memory, model_spec, parse_deployment

V2_LITE = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}


def save(folder: Path, config: object) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


def spec(tmp_path: Path, config: object) -> ModelSpec:
    return model_spec(save(tmp_path / "model", config))


def test_a_published_configuration_gives_the_tables_facts(tmp_path):
    found, known = spec(tmp_path, V2_LITE), MODELS["deepseek-v2-lite"]
    same = ("layers", "moe_layers", "routed_experts", "top_k", "bytes_per_routed_expert", "kv_bytes_per_token")
    assert {k: getattr(found, k) for k in same} == {k: getattr(known, k) for k in same}
    assert found.checkpoint_bytes == pytest.approx(known.checkpoint_bytes, rel=1e-3)
    assert found.flops_per_token_dense["decode"] == pytest.approx(known.flops_per_token_dense["decode"], rel=0.03)


def test_grouped_query_attention_by_hand(tmp_path):
    found = spec(tmp_path, QWEN3_MOE)
    assert found.kv_bytes_per_token == 4 * 2 * 64 * 2 * 2
    attention, router, expert = 256 * 64 * (4 + 4 + 2 * 2), 256 * 16, 3 * 256 * 128
    layers = 4 * (attention + router + 16 * expert)
    assert found.checkpoint_bytes == 2 * (layers + 2 * 4096 * 256)
    assert found.flops_per_token_dense["prefill"] == 2 * (4 * (attention + router + 4 * expert) + 4096 * 256)


def test_fp8_halves_the_layers_and_not_the_embeddings(tmp_path):
    wide = spec(tmp_path, V2_LITE)
    narrow = model_spec(save(tmp_path / "fp8", V2_LITE | {"quantization_config": {"quant_method": "fp8"}}))
    embeddings = 2 * 102400 * 2048 * 2
    assert narrow.checkpoint_bytes - embeddings == (wide.checkpoint_bytes - embeddings) / 2
    assert (narrow.expert_flop_dtype, wide.expert_flop_dtype) == ("fp8", "bf16")


def test_a_folder_deploys_where_a_name_does(tmp_path):
    model = save(tmp_path / "model", QWEN3_MOE)
    pool = {"role": "aggregated", "instances": 1, "dep": 2, "max_num_batched_tokens": 2048, "max_num_seqs": 64}
    deployment = parse_deployment({"model": model, "gpu": "cpu", "pools": [pool]})
    assert check_memory(deployment)[0].kv_tokens > 100_000
    assert parse_deployment(deployment.to_dict()) == deployment


def test_what_an_eager_engine_lacks_is_off_by_default_and_refused_when_asked_for(tmp_path):
    def on_cpu(**knobs):
        pool = {"role": "aggregated", "instances": 1, "dep": 1, **knobs}
        return parse_deployment({"model": str(tmp_path / "model"), "gpu": "cpu", "pools": [pool]})

    save(tmp_path / "model", QWEN3_MOE)
    pool = on_cpu().pools[0]
    assert (pool.async_scheduling, pool.max_cudagraph_capture_size) == (False, 0)
    with pytest.raises(InputError, match="async_scheduling has no effect on cpu; set false"):
        on_cpu(async_scheduling=True)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds a list"),
        ({k: v for k, v in QWEN3_MOE.items() if k != "num_experts"}, "mixture-of-experts"),
        (QWEN3_MOE | {"hidden_size": 0}, "hidden_size"),
        ({k: v for k, v in QWEN3_MOE.items() if k != "vocab_size"}, "vocab_size"),
        (V2_LITE | {"first_k_dense_replace": 27}, "first_k_dense_replace=27"),
    ],
)
def test_a_bad_configuration_names_file_and_key(tmp_path, config, told):
    with pytest.raises(InputError, match=told) as e:
        spec(tmp_path, config)
    assert "config.json" in str(e.value)
    assert "\n" not in str(e.value)


def test_a_name_that_is_neither_known_nor_a_folder_says_what_there_is():
    with pytest.raises(InputError, match="deepseek-v3.*or a model's folder"):
        model_spec("deepseek-v9")
