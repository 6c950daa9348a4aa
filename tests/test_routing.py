"""Routing against plain loops: which slot goes to which expert, and what comes back.

T tokens, k experts a token, S = T * k slots, E experts, K input and N output features.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mxfp4 import mxfp4_expert_linear, ops, routing

SHAPES = [  # T, k, E
    pytest.param(1, 1, 1, id="one of each"),
    pytest.param(7, 2, 3, id="few experts"),
    pytest.param(9, 4, 5, id="more experts than a token takes"),
    pytest.param(4, 6, 3, id="k above E"),
    pytest.param(65, 8, 33, id="E no multiple of anything"),
    pytest.param(129, 8, 128, id="Qwen3-MoE"),
    pytest.param(64, 2, 656, id="far more experts than slots"),
    pytest.param(33, 16, 896, id="Kimi K3"),
    pytest.param(0, 4, 5, id="no token"),
    pytest.param(5, 0, 3, id="no choice"),
]


def random_ids(tokens, k, experts, dtype=torch.int64):
    """Ids from -1 to E, so with both sentinels, and repeated within a row."""
    generator = torch.Generator().manual_seed(tokens + k + experts)
    return torch.randint(-1, experts + 1, (tokens, k), dtype=dtype, generator=generator)


def slots_of(ids, expert):
    """The slots that chose `expert`, in order."""
    return [slot for slot, chosen in enumerate(ids.flatten().tolist()) if chosen == expert]


def naive_combine(by_slot, ids, weights, experts):
    out = torch.zeros(ids.shape[0], by_slot.shape[-1], dtype=by_slot.dtype)
    for t in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            if 0 <= ids[t, j] < experts:
                out[t] += weights[t, j] * by_slot[t * ids.shape[1] + j]
    return out


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("tokens", "k", "experts"), SHAPES)
def test_plan_gives_each_expert_its_slots_in_order(tokens, k, experts, dtype):
    ids = random_ids(tokens, k, experts, dtype)
    plan = routing.plan(ids, experts)
    order, offsets = plan.order.tolist(), plan.offsets.tolist()
    assert offsets[0] == 0
    for e in range(experts):
        assert order[offsets[e] : offsets[e + 1]] == slots_of(ids, e)
        assert plan.experts[offsets[e] : offsets[e + 1]].tolist() == [e] * (offsets[e + 1] - offsets[e])
    assert order[offsets[-1] :] == [s for s, e in enumerate(ids.flatten().tolist()) if not 0 <= e < experts]
    assert plan.experts[offsets[-1] :].eq(experts).all()
    assert torch.equal(plan.valid, (ids >= 0) & (ids < experts))
    assert plan.order.dtype is plan.offsets.dtype is plan.experts.dtype is torch.int64


@pytest.mark.parametrize(("tokens", "k", "experts"), SHAPES)
def test_gather_and_combine_are_inverse_up_to_the_weights(tokens, k, experts):
    ids, generator = random_ids(tokens, k, experts), torch.Generator().manual_seed(1)
    plan = routing.plan(ids, experts)
    x = torch.randn(tokens, 3, generator=generator, dtype=torch.float64)
    weights = torch.randn(tokens, k, generator=generator, dtype=torch.float64)
    rows = routing.gather(x, plan)
    assert torch.equal(rows, x[plan.order // max(k, 1)])
    torch.testing.assert_close(
        routing.combine(rows, plan, weights), naive_combine(x.repeat_interleave(k, dim=0), ids, weights, experts)
    )


@given(data=st.data(), tokens=st.integers(0, 5), k=st.integers(0, 5), experts=st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_any_ids_route_as_a_loop_does(data, tokens, k, experts):
    ids = data.draw(st.lists(st.integers(-3, experts + 3), min_size=tokens * k, max_size=tokens * k))
    ids = torch.tensor(ids, dtype=torch.int64).view(tokens, k)
    plan = routing.plan(ids, experts)
    by_slot = torch.arange(tokens * k, dtype=torch.float64)[:, None] + 1
    weights = torch.arange(1.0, tokens * k + 1, dtype=torch.float64).view(tokens, k)
    assert sorted(plan.order.tolist()) == list(range(tokens * k))
    got = routing.combine(by_slot[plan.order], plan, weights)
    assert torch.equal(got, naive_combine(by_slot, ids, weights, experts))


def test_ids_of_a_dtype_that_cannot_hold_e():
    plan = routing.plan(torch.tensor([[-1, 3]], dtype=torch.int8), 200)
    assert (plan.order.tolist(), plan.experts.tolist()) == ([1, 0], [3, 200])


def test_a_repeated_expert_counts_with_the_sum_of_its_weights():
    plan = routing.plan(torch.tensor([[1, 1]]), 2)
    out = routing.combine(routing.gather(torch.ones(1, 4), plan), plan, torch.tensor([[0.25, 0.5]]))
    assert torch.equal(out, torch.full((1, 4), 0.75))


@pytest.mark.parametrize("stray", [float("nan"), float("inf")])
def test_what_lies_at_a_sentinel_does_not_come_through(stray):
    """Neither the row, nor the weight, nor a gradient."""
    ids = torch.tensor([[0, -1], [2, 1], [2, -1]])
    plan = routing.plan(ids, 2)
    rows = torch.ones(6, 3)
    rows[plan.experts == 2] = stray
    weights = torch.where(plan.valid, 0.5, stray)
    rows.requires_grad_()
    weights.requires_grad_()
    out = routing.combine(rows, plan, weights)
    assert torch.equal(out, torch.tensor([0.5, 0.5, 0.0])[:, None].expand(3, 3))
    out.sum().backward()
    assert torch.equal(rows.grad, torch.where(plan.experts == 2, 0.0, 0.5)[:, None].expand(6, 3))
    assert torch.equal(weights.grad, torch.where(plan.valid, 3.0, 0.0))


def test_combine_gives_the_wider_dtype():
    plan = routing.plan(torch.tensor([[0]]), 1)
    for rows, weights, wide in [("bfloat16", "float32", "float32"), ("float64", "bfloat16", "float64")]:
        ones = [torch.ones(1, 1, dtype=getattr(torch, name)) for name in (rows, weights)]
        assert routing.combine(ones[0], plan, ones[1]).dtype is getattr(torch, wide)


def test_stacks_past_2_to_the_31_have_shapes_on_meta():
    """Kimi K3's experts, ten thousand million bytes: nothing on the way may hold their size in 32 bits."""
    experts, features, width, tokens = 896, 3072, 7168, 5
    blocks = torch.empty(experts, features, width // 2, dtype=torch.uint8, device="meta")
    scales = torch.empty(experts, features, width // 32, dtype=torch.uint8, device="meta")
    assert blocks.numel() > 2**33
    ids, x = torch.empty(tokens, 2, dtype=torch.int64, device="meta"), torch.empty(tokens, width, device="meta")
    plan = routing.plan(ids, experts)
    assert plan.offsets.shape == (experts + 1,)
    assert plan.offsets.dtype is torch.int64
    assert ops.grouped_linear(routing.gather(x, plan), blocks, scales, plan.offsets).shape == (10, features)
    back = ops.grouped_linear(x.new_empty(10, features), blocks, scales, plan.offsets, transpose=True)
    assert back.shape == (10, width)
    shared = torch.empty(tokens, features, device="meta")
    assert mxfp4_expert_linear(x, blocks, scales, ids, x.new_empty(tokens, 2), shared).shape == (tokens, features)


def test_an_expert_past_2_to_the_31_bytes_is_read_where_it_lies(tmp_path, random_packed, decode):
    """A sparse file stands for the stack, so that only the last expert takes memory."""
    features, width = 64, 4096
    experts = 2**31 // (features * width // 2) + 2
    shape = (experts, features, width // 2)
    size = experts * features * width // 2
    blocks = torch.from_file(str(tmp_path / "blocks"), shared=True, size=size, dtype=torch.uint8).view(shape)
    scales = torch.zeros(experts, features, width // 32, dtype=torch.uint8)
    blocks[-1], scales[-1] = random_packed(features, width)
    assert blocks[-1].storage_offset() > 2**31
    ids = torch.tensor([[experts - 1]])
    x = torch.eye(width, dtype=torch.float64)[:1]
    shared, weights = torch.zeros(1, features, dtype=torch.float64), torch.ones(1, 1)
    got = mxfp4_expert_linear(x, blocks, scales, ids, weights, shared)
    assert torch.equal(got[0], decode(blocks[-1], scales[-1])[:, 0])
