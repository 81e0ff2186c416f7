"""What kind of work a kernel does, by its name."""

from __future__ import annotations

import re

from fsdpbench.reports.analysis.device.naming import collective_type

_FAMILIES = (
    ("embedding and index", r"embedding"),
    ("attention", r"flash|fmha|attention|\bsdpa|_fwd_kernel_sdpa|ck_fmha|aten::_scaled_dot_product"),
    ("convolution", r"conv|implicit_gemm|winograd|fprop|MIOpen"),
    (
        "matrix product",
        r"gemm|gemv|matmul|cutlass|xmma|s884|s1688|s16816|Cijk_|nvjet|cublas|aten::(add)?b?mm\b",
    ),
    ("optimizer", r"adam|sgd|multi_tensor_apply|\blamb_|adagrad|rmsprop|aten::_fused_|aten::_foreach_"),
    ("normalization", r"layer_?norm|rms_?norm|batch_?norm|bn_fw|bn_bw|group_?norm|GammaBeta|LayerNorm"),
    ("softmax and loss", r"softmax|nll_loss|cross_entropy|mse_loss"),
    ("embedding and index", r"index|gather|scatter|sort|topk"),
    ("copy", r"memcpy|memset|copy|CatArray|\bcat\b|fill|transpose"),
    ("reduction", r"reduce|triton_(red|per)_|sum|mean|norm_"),
    ("elementwise", r"elementwise|vectorized|triton_poi_|dropout|gelu|relu|silu"),
    ("elementwise", r"(aten::|^)(add|mul|div|sub|clamp)(_|_kernel)?\b"),
)
_PATTERNS = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _FAMILIES)


def family_of(name: str, is_communication: bool, is_copy: bool) -> str:
    """`matrix product`, `attention`, ..., the type of a collective (`all_gather`), or `other`."""
    if is_communication:
        return str(collective_type(name))
    if is_copy:
        return "copy"
    return next((family for family, pattern in _PATTERNS if pattern.search(name)), "other")
