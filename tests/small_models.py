"""Small instances of every model that mlx-lm ships: sizes by the names of a model's fields."""

import dataclasses
import importlib
import inspect
import pkgutil

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_map

LAYERS = 4

#: Values of fields by name, in whatever model they occur. All are small; widths differ from each
#: other, so that a mix-up is an error.
FIELDS = {
    # sizes
    "hidden_size": 64, "hidden_dim": 64, "n_embd": 64, "d_model": 64, "dim": 64, "model_dim": 64,
    "num_hidden_layers": LAYERS, "num_layers": LAYERS, "n_layer": LAYERS, "n_layers": LAYERS,
    "num_attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4, "attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "n_kv_heads": 2, "num_global_key_value_heads": 2,
    "head_dim": 16, "global_head_dim": 16, "attention_head_dim": 16, "kv_channels": 16,
    "intermediate_size": 96, "intermediate_size_mlp": 96, "ffn_hidden_size": 96, "n_inner": 96,
    "shared_intermediate_size": 96, "vocab_size": 128, "block_size": 256, "n_ctx": 256,
    "n_positions": 256, "max_position_embeddings": 256, "model_max_length": 256,
    "original_max_position_embeddings": 256, "sliding_window": 8, "sliding_window_size": 8,
    "attention_window_size": 8, "max_seq_len": 256, "max_sequence_length": 256,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128, "altup_num_inputs": 2,
    "laurel_rank": 8, "num_kv_shared_layers": 2, "num_kv_reuse_layers": 1,
    # numbers
    "rms_norm_eps": 1e-5, "norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "layer_norm_eps": 1e-5,
    "layernorm_epsilon": 1e-5, "layer_norm_rms_epsilon": 1e-5, "rope_theta": 1e4,
    "rotary_emb_base": 10000, "rotary_pct": 0.5, "partial_rotary_factor": 0.5, "rotary_dim": 8,
    "swa_rope_theta": 1e4, "rope_local_base_freq": 1e4,
    "logits_scaling": 2.0, "attention_multiplier": 0.25, "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5, "scale_depth": 1.4, "scale_emb": 2.0, "dim_model_base": 32,
    "routed_scaling_factor": 1.5, "router_scaling_factor": 1.5,
    # experts
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k": 2,
    "moe_intermediate_size": 32, "expert_ffn_hidden_size": 32, "moe_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "share_expert_dim": 32, "n_shared_experts": 1, "num_shared_experts": 1,
    "num_shared_expert": 1, "first_k_dense_replace": 1, "num_dense_layers": 1, "n_group": 2,
    "topk_group": 1, "moe_layer_freq": 1, "decoder_sparse_step": 1, "norm_topk_prob": True,
    "zero_expert_num": 2, "zero_expert_type": "identity", "interleave_moe_layer_step": 2,
    "mlp_only_layers": [], "use_expert_bias": True, "expert_layer_offset": 1,
    "expert_layer_period": 2, "moe_latent_size": None, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "is_moe_layer": [False] + [True] * (LAYERS - 1),
    "num_dense_hidden_layers": 1, "moe_num_shared_experts": 1, "moe_layer_interval": 1,
    # latent attention
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "attention_method": "MLA", "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4,
    # linear attention and state space
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
    "state_size": 16, "ssm_state_size": 16, "conv_kernel": 4, "time_step_rank": 8,
    "time_step_limit": (0.001, 100.0), "n_groups": 2, "mamba_num_heads": 4, "mamba_head_dim": 16,
    "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2, "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_n_groups": 2, "mamba_chunk_size": 8,
    "mamba_dt_rank": 8, "mamba_proj_bias": False, "mamba_conv_bias": True,
    "attn_layer_offset": 1, "attn_layer_period": 2, "conv_L_cache": 3, "conv_bias": False,
    "block_dim": 64, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True, "conv1d_width": 4, "conv_window": 2,
    "lru_width": 64, "layer_group_size": 2, "group_norm_size": 2, "decay_low_rank_dim": 8,
    "gate_low_rank_dim": 8, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "intermediate_dim": 96,
    # switches
    "attention_bias": False, "mlp_bias": False, "use_bias": False, "use_conv_bias": True,
    "tie_word_embeddings": False, "use_qk_norm": True, "qk_norm": True, "post_norm": False,
    "use_cla": False, "use_mixed_mlp_moe": False, "cla_share_factor": 2, "hidden_act": "silu",
    "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    "sliding_window_layers": [1, 3], "sliding_window_pattern": 2,
    "hybrid_layer_pattern": [0, 1] * (LAYERS // 2),
    "no_rope_layers": [1, 0] * (LAYERS // 2),
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
    "swa_v_head_dim": 16,
}  # fmt: skip

SLIDING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip

#: Fields of single models.
OVERRIDES = {
    "afmoe": {"layer_types": SLIDING},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "deepseek_v2": {"rope_scaling": YARN, "topk_method": "group_limited_greedy"},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": SLIDING},
    "gear": {"layer_types": SLIDING},
    "gemma3n": {
        "text_config": {
            "layer_types": SLIDING, "activation_sparsity_pattern": [0.5] + [0.0] * (LAYERS - 1),
            "altup_active_idx": 0, "altup_coef_clip": 120.0, "altup_correct_scale": True,
            "final_logit_softcapping": 30.0,
        },
    },
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 1e4}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * (LAYERS // 2)},
    "hunyuan": {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 2.0}},
    "kimi_linear": {
        "linear_attn_config": {
            "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
        "num_expert_group": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "lfm2-vl": {"text_config": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "llama4": {
        "text_config": {"num_experts_per_tok": 1, "attention_chunk_size": 8, "rope_scaling": None},
    },
    "mellum": {
        "layer_types": SLIDING,
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e4, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    },
    "mimo_v2_flash": {"moe_layer_freq": [0] + [1] * (LAYERS - 1), "partial_rotary_factor": 1},
    "minicpm3": {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 64,
                                  "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}},
    "minimax_m3_vl": {"text_config": {"moe_layer_freq": [0] + [1] * (LAYERS - 1)}},
    "ministral3": {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "type": "default",
                            "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64},
    },
    "mistral4": {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "type": "default",
                            "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64},
    },
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 0.5}},
            {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
            {"attention": {"n_heads_in_group": 1}, "ffn": {"no_op": True}},
        ],
    },
    "nemotron_h": {"hybrid_override_pattern": "M*-E", "partial_rotary_factor": 1.0},
    "olmo_hybrid": {
        "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
    },
    "openelm": {
        "num_transformer_layers": LAYERS, "ffn_dim_divisor": 16, "num_query_heads": [4] * LAYERS,
        "num_kv_heads": [2] * LAYERS, "ffn_multipliers": [1.0] * LAYERS,
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2, "ff_intermediate_size": 96, "gegelu_limit": 20.0,
        "blocksparse_block_size": 64, "blocksparse_num_local_blocks": 2,
        "blocksparse_vert_stride": 2,
    },
    "plamo": {"n_shared_head": 2, "num_key_value_heads": 4},
    "recurrent_gemma": {
        "logits_soft_cap": 30.0, "block_types": ["recurrent", "attention"],
    },
    "spark2_5": {
        "hidden_act": "gelu",
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e4, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    },
    "stablelm": {"use_qkv_bias": True},
    "step3p5": {
        "num_attention_groups": 2, "layer_types": SLIDING, "moe_top_k": 2,
        "moe_layers_enum": "1,2,3", "moe_num_experts": 8,
        "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
    },
}  # fmt: skip


#: Models that are not compared, and why. The list may only shrink.
LEFT_OUT = {
    "bitnet": "its matrix product is a Metal kernel without a fallback",
    "kimi_k3": "its configuration is not described here yet",
    "muse_spark": "its configuration is not described here yet",
    "olmo": "needs a package that is not installed (ai2-olmo)",
    "phi3small": "with these sizes plain MLX, without zmlx, corrupts memory",
    "prism_hadamard_qwen35": "takes packed weights only",
}


def names():
    """Modules of mlx-lm that hold a model."""
    found = []
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        path = module.module_finder.find_spec(module.name).origin
        with open(path) as file:
            if "class ModelArgs" in file.read():
                found.append(module.name)
    return found


def configuration(arguments, **given):
    """The fields of a dataclass of arguments that `FIELDS` knows, and `given`."""
    fields = [f.name for f in dataclasses.fields(arguments)]
    return {**{n: FIELDS[n] for n in fields if n in FIELDS}, **given}


def build(name, dtype=mx.float32, **given):
    """A small model of random weights, and its number of layers."""
    try:
        module = importlib.import_module(f"mlx_lm.models.{name}")
    except SystemExit as error:
        raise ImportError(f"{name} needs a package that is not installed") from error
    arguments = module.ModelArgs
    config = configuration(arguments, model_type=name, **OVERRIDES.get(name, {}))
    config.update(given)
    if (
        "text_config" in {f.name for f in dataclasses.fields(arguments)}
        and "text_config" not in given
    ):
        config["text_config"] = {**_text(module), **(config.get("text_config") or {})}
    mx.random.seed(3)
    model = module.Model(arguments.from_dict(config))
    model.eval()
    model.update(tree_map(lambda p: _weights(p, dtype), model.parameters()))
    mx.eval(model.parameters())
    return model


def _weights(p, dtype):
    """As initialised, but vectors are not all ones and zeros, so that each of them counts, and
    routers not all zeros, whose experts would all be equal."""
    if not mx.issubdtype(p.dtype, mx.floating):
        return p
    if p.ndim == 2 and not p.any():
        p = 0.3 * mx.random.normal(p.shape)
    if p.ndim == 1:
        p = p + 0.1 * mx.random.normal(p.shape)
    return p.astype(dtype)


def _text(module):
    """Fields for the model that a module's text_config describes."""
    inner = getattr(module, "TextArgs", None) or getattr(module, "TextConfig", None)
    if inner is None:
        # The text model is one of the other modules.
        for value in vars(module).values():
            if (
                inspect.ismodule(value)
                and value.__name__.startswith("mlx_lm.models.")
                and hasattr(value, "ModelArgs")
            ):
                name = value.__name__.rpartition(".")[2]
                return configuration(value.ModelArgs, model_type=name, **OVERRIDES.get(name, {}))
        return dict(FIELDS)
    return configuration(inner, model_type=module.__name__.rpartition(".")[2])
