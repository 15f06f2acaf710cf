"""The catalogue: differentiable kernels as functions of arrays.

activations   relu relu2 leaky_relu elu selu celu silu gelu gelu_tanh gelu_quick mish softplus
              softsign sigmoid log_sigmoid tanh hardswish hardsigmoid hardtanh exp log
gated units   glu swiglu geglu geglu_tanh reglu swiglu_clamped, each of two arrays and, as
              …_packed, of the halves of one
softmax       softmax log_softmax logsumexp masked_softmax sparsemax
norms         rms_norm layer_norm l2_norm group_norm add_rms_norm add_layer_norm
              rms_norm_dropout layer_norm_dropout dropout_add_rms_norm dropout_add_layer_norm
dropout       dropout
losses        cross_entropy
attention     scaled_dot_product_attention varlen_attention decode_attention paged_attention
              quantized_attention
"""

from ..backend import require_mlx

require_mlx()

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
from .attention import scaled_dot_product_attention
from .decode import decode_attention
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
from .losses import cross_entropy
from .masked_softmax import masked_softmax
from .norms import add_layer_norm, add_rms_norm, l2_norm, layer_norm, rms_norm
from .norms_dropout import (
    dropout_add_layer_norm,
    dropout_add_rms_norm,
    layer_norm_dropout,
    rms_norm_dropout,
)
from .paged import paged_attention
from .quantized import quantized_attention
from .softmax import log_softmax, logsumexp, softmax
from .sparsemax import sparsemax
from .varlen import varlen_attention

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "celu",
    "cross_entropy",
    "decode_attention",
    "dropout",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "elu",
    "exp",
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
    "l2_norm",
    "layer_norm",
    "layer_norm_dropout",
    "leaky_relu",
    "log",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "masked_softmax",
    "mish",
    "paged_attention",
    "quantized_attention",
    "reglu",
    "reglu_packed",
    "relu",
    "relu2",
    "rms_norm",
    "rms_norm_dropout",
    "scaled_dot_product_attention",
    "selu",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "softsign",
    "sparsemax",
    "swiglu",
    "swiglu_clamped",
    "swiglu_clamped_packed",
    "swiglu_packed",
    "tanh",
    "varlen_attention",
]
