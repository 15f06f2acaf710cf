"""The catalogue: differentiable kernels as functions of arrays.

activations   relu relu2 leaky_relu elu selu celu silu gelu gelu_tanh gelu_quick mish softplus
              softsign sigmoid log_sigmoid tanh hardswish hardsigmoid hardtanh exp log
gated units   glu swiglu geglu geglu_tanh reglu swiglu_clamped, each of two arrays and, as
              …_packed, of the halves of one
softmax       softmax log_softmax logsumexp masked_softmax sparsemax
norms         rms_norm layer_norm l2_norm group_norm add_rms_norm add_layer_norm
              rms_norm_dropout layer_norm_dropout dropout_add_rms_norm dropout_add_layer_norm
dropout       dropout
losses        cross_entropy linear_cross_entropy kl_div js_div
reductions    sum mean max min var std argmax argmin topk
scans         cumsum cumprod
rope          rope rope_append qk_norm_rope, with rope_freqs for their frequencies
moe           topk_gating moe_sort moe_dispatch moe_combine expert_ffn
optimizers    adamw lion sgd
attention     scaled_dot_product_attention varlen_attention decode_attention paged_attention
              quantized_attention
"""

from . import gradient_norm as gradient_norm
from .activations import (
    celu,
    elu,
    exp,
    gelu,
    gelu_quick,
    gelu_tanh,
    hardsigmoid,
    hardswish,
    hardtanh,
    leaky_relu,
    log,
    log_sigmoid,
    mish,
    relu,
    relu2,
    selu,
    sigmoid,
    silu,
    softplus,
    softsign,
    tanh,
)
from .arg_reductions import argmax, argmin
from .attention import scaled_dot_product_attention
from .cross_entropy import cross_entropy
from .decode import decode_attention
from .divergences import js_div, kl_div
from .dropout import dropout
from .glu import (
    geglu,
    geglu_packed,
    geglu_tanh,
    geglu_tanh_packed,
    glu,
    glu_packed,
    reglu,
    reglu_packed,
    swiglu,
    swiglu_clamped,
    swiglu_clamped_packed,
    swiglu_packed,
)
from .group_norm import group_norm
from .linear_cross_entropy import linear_cross_entropy
from .masked_softmax import masked_softmax
from .moe_experts import expert_ffn
from .moe_gating import topk_gating
from .moe_rows import moe_combine, moe_dispatch
from .moe_sort import moe_sort
from .norms import add_layer_norm, add_rms_norm, l2_norm, layer_norm, rms_norm
from .norms_dropout import (
    dropout_add_layer_norm,
    dropout_add_rms_norm,
    layer_norm_dropout,
    rms_norm_dropout,
)
from .optimizer_steps import adamw, lion, sgd
from .paged import paged_attention
from .qk_norm_rope import qk_norm_rope
from .quantized import quantized_attention
from .reductions import max, mean, min, std, sum, var
from .rope import rope
from .rope_append import rope_append
from .rope_freqs import rope_freqs
from .scans import cumprod, cumsum
from .softmax import log_softmax, logsumexp, softmax
from .sparsemax import sparsemax
from .topk import topk
from .varlen import varlen_attention

__all__ = [
    "adamw",
    "add_layer_norm",
    "add_rms_norm",
    "argmax",
    "argmin",
    "celu",
    "cross_entropy",
    "cumprod",
    "cumsum",
    "decode_attention",
    "dropout",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "elu",
    "exp",
    "expert_ffn",
    "geglu",
    "geglu_packed",
    "geglu_tanh",
    "geglu_tanh_packed",
    "gelu",
    "gelu_quick",
    "gelu_tanh",
    "glu",
    "glu_packed",
    "group_norm",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "js_div",
    "kl_div",
    "l2_norm",
    "layer_norm",
    "layer_norm_dropout",
    "leaky_relu",
    "linear_cross_entropy",
    "lion",
    "log",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "masked_softmax",
    "max",
    "mean",
    "min",
    "mish",
    "moe_combine",
    "moe_dispatch",
    "moe_sort",
    "paged_attention",
    "qk_norm_rope",
    "quantized_attention",
    "reglu",
    "reglu_packed",
    "relu",
    "relu2",
    "rms_norm",
    "rms_norm_dropout",
    "rope",
    "rope_append",
    "rope_freqs",
    "scaled_dot_product_attention",
    "selu",
    "sgd",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "softsign",
    "sparsemax",
    "std",
    "sum",
    "swiglu",
    "swiglu_clamped",
    "swiglu_clamped_packed",
    "swiglu_packed",
    "tanh",
    "topk",
    "topk_gating",
    "var",
    "varlen_attention",
]
