"""What the names of a constructor's arguments, and of the fields of its config, stand for."""

from __future__ import annotations

NAMES: dict[str, tuple[str, ...]] = {
    "hidden": (
        *("hidden_size", "embed_dim", "d_model", "dim", "n_embd", "d_in", "emb_dim", "embedding_dim", "model_dim"),
        *("query_dim", "in_features", "dim_in", "in_dim", "d_embed", "embed_size", "hidden_dim", "width", "n_state"),
        *("channels", "in_channels", "d_hidden", "d_emb", "input_dim", "model_size", "dmodel", "q_dim", "C", "d", "nx"),
        *("features", "num_features", "n_features", "feature_dim", "token_dim", "n_units", "units", "query_size"),
    ),
    "heads": (
        *("num_heads", "n_heads", "heads", "n_head", "num_attention_heads", "nhead", "num_q_heads", "n_q_heads"),
        *("num_query_heads", "n_query_heads", "query_heads", "q_heads", "head", "nheads", "h", "nr_heads"),
        "num_attn_heads",
    ),
    "kv_heads": (
        *("num_kv_heads", "num_key_value_heads", "n_kv_heads", "kv_heads", "n_kv_head", "num_kv_groups"),
        *("n_query_groups", "num_query_groups", "n_kv_groups", "nkv_heads"),
    ),
    "head_dim": ("head_dim", "dim_head", "d_head", "head_size", "d_k", "d_kv", "kv_channels", "dim_key", "d_qk"),
    "v_dim": ("d_out_v", "v_head_dim", "dim_value", "value_dim", "d_v", "dim_v", "v_dim"),
    "qk_out": ("d_out_kq", "d_out_qk", "d_kq", "kq_dim", "qk_dim", "dim_qk", "dim_kq"),
    "out": ("d_out", "out_dim", "dim_out", "output_dim", "out_features", "out_channels"),
    "kv_hidden": ("d_context", "context_dim", "kv_dim", "cross_attention_dim", "dim_context", "encoder_dim"),
    "context": (
        *("context_length", "block_size", "max_seq_len", "max_position_embeddings", "n_ctx", "max_len", "seq_len"),
        *("context_size", "max_seq_length", "ctx_len", "max_length", "n_positions", "seq_length", "max_context"),
        *(
            "max_positions",
            "max_seqlen",
            "maxlen",
            "max_position",
            "max_seq",
            "seqlen",
            "sequence_length",
            "num_tokens",
        ),
    ),
    "dropout": (
        *("dropout", "attn_drop", "attention_dropout", "attn_pdrop", "resid_pdrop", "proj_drop", "dropout_p", "p"),
        *("attn_dropout", "attention_probs_dropout_prob", "dropout_rate", "drop_rate", "drop", "embd_pdrop"),
        *("hidden_dropout_prob", "resid_dropout", "residual_dropout", "dropout_prob", "attn_dropout_p", "pdrop"),
    ),
    "bias": ("bias", "qkv_bias", "use_bias", "attention_bias", "out_bias", "proj_bias", "qk_bias"),
    "causal": ("causal", "is_causal", "use_causal_mask", "masked", "causal_mask"),
    "channels": ("rotary_dim", "query_pre_attn_scalar"),  # a number that is usually the channels of a head
    "scale": ("attention_multiplier",),
    "one": ("attention_downsample_rate", "downsample_rate"),  # by which the channels of a head are divided
    "layer": ("layer_idx", "layer_id", "layer_index"),
    "window": (
        *("window", "window_size", "sliding_window", "local_window_size", "attention_window", "window_len"),
        *("local_window", "attn_window", "attn_window_size", "sliding_window_size"),
    ),
    "softcap": (
        *("softcap", "soft_cap", "logit_softcap", "logits_softcap", "logit_soft_cap", "logits_soft_cap", "softcapping"),
        *("attn_softcap", "attn_logit_softcap", "attn_logit_softcapping", "attn_logits_soft_cap", "logit_softcapping"),
        *("attention_softcap", "attention_logit_softcapping", "attn_logits_softcap", "score_softcap", "logit_cap"),
    ),
    "alibi": ("alibi", "use_alibi", "with_alibi"),
    "sinks": ("use_sinks", "use_sink", "with_sinks", "has_sinks", "attention_sinks", "attn_sinks"),
}
ROLE_OF = {name: role for role, names in NAMES.items() for name in names}
# fields of a config class that keep their defaults
UNASKED = ("bias", "layer", "out", "kv_hidden", "window", "alibi", "sinks")
VARIANTS = ("softcap", "window", "alibi", "sinks")  # what a module may be built with, or be without
CONFIGS = ("config", "cfg", "args", "model_args", "conf", "params", "hparams")
