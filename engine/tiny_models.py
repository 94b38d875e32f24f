"""Model folders without weights, small enough for the engine on a CPU: every measurement can be tried without a model.

`python -m rackplan.engine.tiny_models FOLDER` writes FOLDER/tiny-qwen3-moe and FOLDER/tiny-deepseek-v3 (config.json
and a tokenizer); vLLM fills the weights at random with `--load-format dummy`. Both are mixtures of 16 experts, 4 a
token, in 4 layers; the second has latent attention, a dense first layer, a shared expert and one draft layer (MTP).
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rackplan.engine.errors import InputError

VOCABULARY = 4096
SPECIAL = ("bos_token", "eos_token", "pad_token")
SHARED: dict[str, Any] = {
    "bos_token_id": VOCABULARY - 3,
    "eos_token_id": VOCABULARY - 2,
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
}
TINY_MODELS: dict[str, dict[str, Any]] = {
    "tiny-qwen3-moe": SHARED
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "head_dim": 64,
        "mlp_only_layers": [],
        "num_experts": 16,
        "num_key_value_heads": 2,
        "router_aux_loss_coef": 0.001,
    },
    "tiny-deepseek-v3": SHARED
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "moe_layer_freq": 1,
        "n_group": 4,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
    },
}


def write_model_folder(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes `config` as a model folder with a tokenizer of one word per token id.

    The last three ids of the vocabulary are the special tokens, `<sp0>` to `<sp2>`, named unlike any word; the others
    are `t0`, `t1`, … Needs transformers, which comes with vLLM; raises InputError without it.
    """
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
    except ModuleNotFoundError as error:
        raise InputError(f"{error.name} is missing; it comes with vLLM: pip install 'rackplan[engine-cpu]'") from None
    words = config["vocab_size"] - len(SPECIAL)
    model = models.WordLevel({f"t{i}": i for i in range(words)}, unk_token="t0")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    names = {name: f"<sp{i}>" for i, name in enumerate(SPECIAL)}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def main() -> int:
    """The command."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: python -m rackplan.engine.tiny_models FOLDER", file=sys.stderr)
        return 2
    try:
        for name, config in TINY_MODELS.items():
            write_model_folder(Path(sys.argv[1]) / name, config)
            print(Path(sys.argv[1]) / name)
    except (InputError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
