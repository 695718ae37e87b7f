"""Attention written to be read, from one head to many.

naive                   softmax(q k' / sqrt(d)) v of given q, k, v
self_attention          one head with its projections
causal_self_attention   the future hidden before the softmax, and after it to show what breaks
cross_attention         two sequences of different length
multi_head_wrapper      several heads as several modules
cached_attention        keys and values kept from call to call, and what one new word needs of them
multi_head              all heads in one product: grouped heads, masks, dropout, and torch's fused attention
"""
