"""Experts on disk: which are read, what is kept, and that nothing else changes."""

import copy

import pytest
import torch
from accelerate import disk_offload
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hf_mxfp4
from hf_mxfp4.quantizer.streaming import StreamingHook


@pytest.fixture
def offloaded(load, packed_folder, tmp_path):
    """A packed folder of a family, loaded with all decoder layers on disk; and the same in memory."""

    def make(source, **options):
        folder = packed_folder(source, **{k: v for k, v in options.items() if k == "save_format"})
        inside = load(folder, dtype=torch.bfloat16)
        layers = next(name for name, m in inside.named_modules() if name.endswith("layers"))
        places = {name: "cpu" for name, _ in inside.named_children() if not layers.startswith(name)}
        stem = layers.rpartition(".")[0]
        places |= {f"{stem}.{name}": "cpu" for name, _ in inside.get_submodule(stem).named_children()}
        places |= {layers: "disk"}
        config = hf_mxfp4.MXFP4Config(**options)
        return load(
            folder, dtype=torch.bfloat16, config=config, device_map=places, offload_folder=tmp_path / "o"
        ), inside

    return make


def hooks(model):
    found = [m._hf_hook for m in model.modules() if isinstance(m, hf_mxfp4.MXFP4Experts)]
    assert found
    assert all(isinstance(hook, StreamingHook) for hook in found)
    return found


def picked(model, tokens):
    """The experts that each layer's router picks, by a hook on the experts of a model in memory."""
    seen = []
    handles = [
        m.register_forward_pre_hook(lambda m, a: seen.append({e for e in a[1].unique().tolist() if e < m.num_routed}))
        for m in model.modules()
        if isinstance(m, hf_mxfp4.MXFP4Experts)
    ]
    with torch.no_grad():
        logits = model(tokens).logits
    for handle in handles:
        handle.remove()
    return seen, logits


def test_only_picked_experts_are_read_and_logits_are_the_same(source, offloaded):
    streamed, inside = offloaded(source)
    for token in (5, 77, 5):
        before = [hook.reads + hook.hits for hook in hooks(streamed)]
        seen, logits = picked(inside, torch.tensor([[token]]))
        with torch.no_grad():
            assert torch.equal(streamed(torch.tensor([[token]])).logits, logits)
        used = [hook.reads + hook.hits - b for hook, b in zip(hooks(streamed), before, strict=True)]
        assert used == [len(experts) for experts in seen]
    assert all(hook.hits >= 2 for hook in hooks(streamed))  # the third token's, read for the first
    assert all(
        parameter.is_meta
        for m in streamed.modules()
        if isinstance(m, hf_mxfp4.MXFP4Experts)
        for parameter in m.parameters(recurse=False)
    )


def test_prompts_and_generation_are_the_same(source, offloaded, tokens):
    streamed, inside = offloaded(source)
    with torch.no_grad():
        assert torch.equal(streamed(tokens).logits, inside(tokens).logits)
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(streamed.generate(tokens, **options), inside.generate(tokens, **options))


@pytest.mark.parametrize("slots", [0, 1, 2, 3])
def test_memory_for_experts_is_bounded(slots, sources, offloaded):
    _, inside = offloaded(sources["qwen3_moe"])
    experts = [m for m in inside.modules() if isinstance(m, hf_mxfp4.MXFP4Experts)]
    one = sum(p.numel() for p in experts[0].parameters()) // experts[0].num_experts
    streamed, _ = offloaded(sources["qwen3_moe"], expert_cache_bytes=len(experts) * (slots * one + one // 2))
    for token in range(3, 40):
        with torch.no_grad():
            assert torch.equal(streamed(torch.tensor([[token]])).logits, inside(torch.tensor([[token]])).logits)
    for hook in hooks(streamed):
        assert hook.count == slots
        held = sum(t.numel() for t in hook._slots.tensors.values()) if hook._slots else 0
        assert held == (slots * one if slots >= 2 else 0)  # a token needs two
        assert (hook.hits > 0) == (slots >= 2)


def test_the_least_recently_used_expert_makes_room(sources, offloaded):
    streamed, _ = offloaded(sources["qwen3_moe"])
    module = next(m for m in streamed.modules() if isinstance(m, hf_mxfp4.MXFP4Experts))
    hook, x = module._hf_hook, torch.randn(1, 64).to(torch.bfloat16)
    hook.count = 3
    with torch.no_grad():
        for ids in ([0, 1], [2, 1], [4, 1]):  # 0 was not used for longest
            module(x, torch.tensor([ids]), torch.ones(1, 2))
        assert set(hook._slots.held) == {1, 2, 4}
        reads = hook.reads
        module(x, torch.tensor([[4, 2]]), torch.ones(1, 2))
        assert hook.reads == reads
        module(x, torch.tensor([[0, 4]]), torch.ones(1, 2))
    assert set(hook._slots.held) == {0, 2, 4}
    assert hook.reads == reads + 1


def test_ids_of_no_expert_contribute_nothing(sources, offloaded):
    streamed, inside = offloaded(sources["gpt_oss"])
    pair = [next(m for m in model.modules() if isinstance(m, hf_mxfp4.MXFP4Experts)) for model in (streamed, inside)]
    x = torch.randn(4, 64).to(torch.bfloat16)
    ids, weights = torch.tensor([[0, 4], [9, 2], [5, 4], [-1, 3]]), torch.rand(4, 2)
    with torch.no_grad():
        got, expected = (module(x, ids, weights) for module in pair)
    assert torch.equal(got, expected)
    assert not bool(got[2].any())


def test_gradients_pass_and_later_calls_leave_them_right(sources, offloaded):
    streamed, inside = offloaded(sources["qwen3_moe"])
    grads = []
    for model in (streamed, inside):
        module = next(m for m in model.modules() if isinstance(m, hf_mxfp4.MXFP4Experts))
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
        out = module(x, torch.tensor([[0, 1], [2, 3], [0, 4]]), torch.ones(3, 2))
        with torch.no_grad():
            module(x, torch.tensor([[4, 3]] * 3), torch.ones(3, 2))
        out.square().sum().backward()
        grads.append(x.grad)
    assert torch.allclose(*grads, rtol=1e-5, atol=1e-6)


def test_saved_and_copied_models_hold_all_experts(source, offloaded, tmp_path, tokens):
    streamed, inside = offloaded(source)
    with torch.no_grad():
        logits = streamed(tokens).logits
    streamed.save_pretrained(tmp_path / "a")
    inside.save_pretrained(tmp_path / "b")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a)
    copied = copy.deepcopy(streamed)
    assert all(ours is not theirs for ours, theirs in zip(hooks(copied), hooks(streamed), strict=True))
    with torch.no_grad():
        assert torch.equal(copied(tokens).logits, logits)


def test_a_model_dispatched_by_hand_is_streamed_when_asked(sources, load, packed_folder, tokens, tmp_path):
    folder = packed_folder(sources["mixtral"])
    model = load(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = model(tokens).logits
    assert hf_mxfp4.stream_experts(model) == 0
    disk_offload(model, offload_dir=tmp_path / "o", execution_device="cpu")
    assert hf_mxfp4.stream_experts(model, cache_bytes=1 << 20) == 2
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, logits)
    assert all(hook.reads > 0 for hook in hooks(model))
    with pytest.raises(ValueError, match=r"cache_bytes is -1; expected 0 or more"):
        hf_mxfp4.stream_experts(model, cache_bytes=-1)


@pytest.mark.parametrize("value", [-1, 1.5, True, "1GB"])
def test_other_sizes_of_the_cache_are_refused(value):
    with pytest.raises(ValueError, match=r"expert_cache_bytes is .*; expected a number of bytes"):
        hf_mxfp4.MXFP4Config(expert_cache_bytes=value)


def test_a_plain_checkpoint_loaded_to_disk_is_streamed(sources, load, tokens, tmp_path):
    places = {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.norm": "cpu",
        "lm_head": "cpu",
        "model.layers": "disk",
    }
    model = load(sources["qwen3_moe"], dtype=torch.bfloat16, device_map=places, offload_folder=tmp_path / "o")
    expected = AutoModelForCausalLM.from_pretrained(
        sources["qwen3_moe"], dtype=torch.bfloat16, quantization_config=hf_mxfp4.MXFP4Config()
    )
    hooks(model)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected(tokens).logits)
