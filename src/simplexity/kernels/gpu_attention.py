"""Attention of one new token a row to the tokens its own text has so far, read where they lie.

    out = Σ_t softmax_t(<query, key_t>·scale)·value_t,   t < length of the row

Rows of very different lengths stand in one batch, so each program reads the keys of its row alone, once for all the
query heads that share them, and stops where the text does.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalOperand=false, reportOperatorIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # keys read at a time


@triton.jit
def attend(
    query, keys, values, out, slots, lengths, scale, room,
    HEADS: tl.constexpr, SHARING: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row and one of its HEADS key heads, which SHARING query heads share."""
    row, head = tl.program_id(0), tl.program_id(1)
    slot, length = tl.load(slots + row), tl.load(lengths + row)
    member, place = tl.arange(0, PADDED), tl.arange(0, SIZE)
    own = (row * HEADS + head) * SHARING * SIZE + member[:, None] * SIZE + place[None, :]
    asked = tl.load(query + own, mask=(member < SHARING)[:, None], other=0.0)
    first = (slot.to(tl.int64) * HEADS + head) * room * SIZE
    highest = tl.full([PADDED], float("-inf"), tl.float32)
    mass = tl.zeros([PADDED], tl.float32)
    total = tl.zeros([PADDED, SIZE], tl.float32)
    start = length * 0
    while start < length:
        t = start + tl.arange(0, BLOCK)
        there = t < length
        key = tl.load(keys + first + t[None, :] * SIZE + place[:, None], mask=there[None, :], other=0.0)
        score = tl.dot(asked, key, input_precision="ieee") * scale
        score = tl.where(there[None, :], score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        fade = tl.exp(highest - higher)
        value = tl.load(values + first + t[:, None] * SIZE + place[None, :], mask=there[:, None], other=0.0)
        total = total * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        mass = mass * fade + tl.sum(weight, 1)
        highest = higher
        start += BLOCK
    total = total / mass[:, None]
    tl.store(out + own, total.to(out.dtype.element_ty), mask=(member < SHARING)[:, None])


def attention(query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """query `[B, heads, size]`, keys and values `[slots, key heads, room, size]` -> `[B, heads, size]`.

    Row b reads its slot up to its length, which is at least 1.
    """
    out = torch.empty_like(query)
    heads = keys.shape[1]
    sharing = query.shape[1] // heads
    kernel: Any = attend
    kernel[(len(query), heads)](
        query, keys, values, out, slots, lengths, scale, keys.shape[2],
        HEADS=heads, SHARING=sharing, PADDED=max(16, 1 << (sharing - 1).bit_length()), SIZE=query.shape[2],
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out
