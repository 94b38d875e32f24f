"""Model folders without weights: DeepSeek-V2-Lite's shape, slices of DeepSeek-V3 at true widths. Run: models.py DIR.

`dsv3_L4` has 1 dense and 3 MoE layers, `dsv3_L2` 1 and 1: half their difference is one MoE layer. Expert groups are 1
of 1 in place of V3's 4 of 8, because the balanced routing of `vllm bench forward` knows no groups.
"""

import sys
from pathlib import Path

from rackplan.engine.tiny_models import write_model_folder

YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
SHARED = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "first_k_dense_replace": 1,
}
V2_LITE = SHARED | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "q_lora_rank": None,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "vocab_size": 102400,
}
V3 = SHARED | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
    "ep_size": 1,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}


def main(root: Path) -> None:
    configs = {"dsv2lite": V2_LITE} | {f"dsv3_L{n}": V3 | {"num_hidden_layers": n} for n in (2, 4)}
    for name, config in configs.items():
        write_model_folder(root / name, config)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
