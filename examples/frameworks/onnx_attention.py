"""The operator Attention of ONNX, by onnx's reference evaluator: `pytest ... --attn-impl=onnx`."""

import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator

from attn_spec.adapters.bridge import bridged


def operator(q, k, v, attn_mask=None, *, is_causal=False, scale=None, softcap=0.0):
    given = {"Q": q, "K": k, "V": v} | ({} if attn_mask is None else {"mask": attn_mask})
    attributes = {"is_causal": int(is_causal), "softcap": softcap} | ({} if scale is None else {"scale": scale})
    node = helper.make_node("Attention", list(given), ["Y"], **attributes)
    return ReferenceEvaluator(node).run(None, given)[0]


attention = bridged(operator, torch.Tensor.numpy, torch.from_numpy)
