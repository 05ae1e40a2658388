"""Who decides that a call is dense: the rules, without a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from focus_hf import FocusConfig
from focus_hf.adapter.decide import Decision, decide, dense_by_groups


def cached(tokens):
    return SimpleNamespace(get_seq_length=lambda: tokens)


def decided(*, top_k=1, dense_below=0, mode=None, learns=False, new_tokens=10, cache_layer=None):
    config = FocusConfig(num_groups=4, top_k=top_k, local_window=9, dense_below=dense_below)
    return decide(config, mode, learns=learns, new_tokens=new_tokens, cache_layer=cache_layer)


HARD, SOFT = Decision(soft=False, dense=False), Decision(soft=True, dense=False)
HARD_BUT_DENSE, SOFT_BUT_DENSE = Decision(soft=False, dense=True), Decision(soft=True, dense=True)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"new_tokens": 10}, HARD_BUT_DENSE),  # w + 1 tokens: each has all before it in its window
        ({"new_tokens": 11}, HARD),
        ({"new_tokens": 30, "dense_below": 30}, HARD_BUT_DENSE),
        ({"new_tokens": 31, "dense_below": 30}, HARD),
        ({"new_tokens": 1, "cache_layer": cached(9)}, HARD_BUT_DENSE),
        ({"new_tokens": 1, "cache_layer": cached(10)}, HARD),
        ({"new_tokens": 50, "top_k": 2}, HARD),
        ({"new_tokens": 50, "top_k": 3}, HARD_BUT_DENSE),  # any two of four groups' threes share one
        ({"new_tokens": 50, "top_k": 3, "mode": "local"}, HARD),
        ({"new_tokens": 50, "top_k": 3, "cache_layer": cached(0)}, HARD),  # until the cached tokens' groups are known
        ({"new_tokens": 50, "learns": True}, SOFT),
        ({"new_tokens": 10, "learns": True}, SOFT_BUT_DENSE),
        ({"new_tokens": 50, "learns": True, "top_k": 3}, SOFT),  # its gradients are what training wants
        ({"new_tokens": 50, "learns": True, "mode": "hard"}, HARD),
        ({"new_tokens": 50, "mode": "soft"}, SOFT),
        ({"new_tokens": 50, "mode": "soft", "cache_layer": cached(0)}, SOFT),
    ],
)
def test_a_call_is_dense_where_every_pair_is_attended(call, expected):
    assert decided(**call) == expected


def test_soft_attention_does_not_continue_a_cache():
    with pytest.raises(ValueError, match="cannot continue a cache"):
        decided(mode="soft", cache_layer=cached(3))


def test_cached_tokens_of_fewer_groups_are_counted():
    config = FocusConfig(num_groups=4, top_k=3)
    memberships = torch.tensor([[[True, True, True, False], [False, True, True, True]]])
    assert dense_by_groups(config, memberships)
    memberships[0, 0, :2] = False
    assert not dense_by_groups(config, memberships)
    assert dense_by_groups(config, memberships, groups_each=3)  # what is known is not looked at
