"""LoRA through PEFT: on packed experts as on the dense model of the same weights, and on attention beside them."""

import copy
import importlib
import logging
import math
import pickle
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Llama4ForCausalLM,
    Llama4TextConfig,
    Trainer,
    TrainingArguments,
)

import hf_mxfp4
from hf_mxfp4 import routing
from hf_mxfp4.linear import MXFP4Linear
from hf_mxfp4.quantizer import adapters, late

BOTH = ["experts.gate_up_proj", "experts.down_proj"]


def config(family="qwen3_moe", **options):
    targets = ["experts.up_proj", "experts.down_proj"] if family == "nemotron_h" else BOTH
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": [], "target_parameters": targets, **options})


def lora_of(model):
    return {name: p for name, p in model.named_parameters() if ".lora_" in name}


def fill(model, seed=0, std=0.05):
    """Random adapters: PEFT's own begin with B = 0, which adds nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lora_of(model).values():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return model


def bytes_of(model):
    return {
        name.replace(".base_layer", ""): p.detach().clone()
        for name, p in model.named_parameters()
        if p.dtype is torch.uint8
    }


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def distance(value, reference):
    return ((value - reference).norm() / reference.norm()).item()


@pytest.fixture
def pair(load):
    """A packed model of a folder and the dense one with what it holds decoded."""

    def pair(path, **options):
        return load(path, **options), load(path, **options).dequantize()

    return pair


def test_peft_is_imported_by_nobody_here():
    code = "import sys, hf_mxfp4; assert 'peft' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_done_when_a_module_is_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "late_stand_in.py").write_text("value = 1")
    calls = []

    def act():
        calls.append(sys.modules["late_stand_in"].value)

    finders = list(sys.meta_path)
    late.when_imported("late_stand_in", act)
    assert calls == []
    importlib.import_module("late_stand_in")
    assert calls == [1]
    assert sys.meta_path == finders
    late.when_imported("late_stand_in", act)
    assert calls == [1, 1]


def test_loss_and_gradients_are_those_of_the_dense_model(family, source, pair, tokens):
    packed, dense = (fill(get_peft_model(model, config(family))) for model in pair(source))
    before = bytes_of(packed)
    losses = [model(tokens, labels=tokens).loss for model in (packed, dense)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    ours, theirs = lora_of(packed), lora_of(dense)
    assert list(ours) == list(theirs)
    assert len(ours) >= 4
    for name, parameter in ours.items():
        assert distance(parameter.grad, theirs[name].grad) < 1e-5, name
    assert same(bytes_of(packed), before)
    trainable = {name for name, p in packed.named_parameters() if p.requires_grad}
    assert trainable == set(ours)


@pytest.mark.parametrize("count", [0, 1, 40, 400])  # no slots; one tile; small tiles; large tiles
def test_low_rank_is_the_sum_over_experts(count):
    torch.manual_seed(0)
    experts, first, second = 3, torch.randn(3, 32, 2, dtype=torch.double), torch.randn(3, 2, 5, dtype=torch.double)
    ids = torch.randint(-1, experts + 1, (count, 2))  # some of no expert
    ids[ids == 1] = 0  # and an expert without slots
    x, slots = torch.randn(2 * count, 32, dtype=torch.double), routing.plan(ids, experts)
    got = adapters.low_rank([(first, second, 2.0), (first, second, 1.0)], x, slots)
    for place, e in enumerate(slots.experts.tolist()):
        if e < experts:
            torch.testing.assert_close(got[place], 3 * x[place] @ first[e] @ second[e])
    assert got.shape == (2 * count, 5)


def test_rows_of_others_stay_out_of_an_expert():
    first, second = torch.ones(2, 32, 1, requires_grad=True), torch.ones(2, 1, 4, requires_grad=True)
    slots = routing.plan(torch.tensor([[0], [1], [2]]), 2)
    x = torch.ones(3, 32)
    x[1:] = math.nan
    out = adapters.low_rank([(first, second, 1.0)], x, slots)
    out[0].sum().backward()
    assert bool(first.grad[0].isfinite().all())
    assert bool(second.grad[0].isfinite().all())


def test_one_projection_alone_and_one_layer_alone(sources, pair, tokens):
    for targets in (BOTH[:1], BOTH[1:], ["layers.1.mlp.experts.down_proj"]):
        packed, dense = (fill(get_peft_model(m, config(target_parameters=targets))) for m in pair(sources["qwen3_moe"]))
        assert lora_of(packed).keys() == lora_of(dense).keys()
        assert distance(packed(tokens).logits, dense(tokens).logits) < 1e-5


def test_llama4_whose_class_does_not_say_that_it_is_transposed(tmp_path, pair, tokens):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "intermediate_size_mlp": 96,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "num_local_experts": 4}
    model = Llama4ForCausalLM(Llama4TextConfig(**sizes, **heads, interleave_moe_layer_step=1, pad_token_id=0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.15)
    model.save_pretrained(tmp_path)
    packed, dense = (fill(get_peft_model(m, config())) for m in pair(tmp_path))
    assert distance(packed(tokens).logits, dense(tokens).logits) < 1e-5
    wanted = packed(tokens).logits
    packed.base_model.model.dequantize()
    assert distance(packed(tokens).logits, wanted) < 1e-5


@pytest.mark.parametrize("cast", [True, False])
def test_bfloat16_models(sources, pair, tokens, cast):
    packed, dense = (
        fill(get_peft_model(m, config(), autocast_adapter_dtype=cast))
        for m in pair(sources["qwen3_moe"], dtype=torch.bfloat16)
    )
    assert {p.dtype for p in lora_of(packed).values()} == {torch.float32 if cast else torch.bfloat16}
    reference = fill(get_peft_model(pair(sources["qwen3_moe"])[1], config()))
    wanted = reference(tokens).logits
    assert distance(packed(tokens).logits.float(), wanted) < 1.2 * distance(dense(tokens).logits.float(), wanted)


def test_saved_loaded_and_taken_from_the_dense_model(family, source, load, pair, tokens, packed_folder, tmp_path):
    packed, dense = (fill(get_peft_model(model, config(family)), seed=3) for model in pair(source))
    wanted = packed(tokens).logits
    packed.save_pretrained(tmp_path / "ours")
    dense.save_pretrained(tmp_path / "theirs")
    folder = packed_folder(source)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(PeftModel.from_pretrained(plain, tmp_path / "ours")(tokens).logits, wanted)
    on_load = PeftModel.from_pretrained(load(source), tmp_path / "theirs", low_cpu_mem_usage=True)
    assert torch.equal(on_load(tokens).logits, wanted)
    back = PeftModel.from_pretrained(pair(source)[1], tmp_path / "ours")
    assert distance(back(tokens).logits, dense(tokens).logits) == 0


def test_merge_rounds_anew_and_says_so(family, source, load, tokens, tmp_path, caplog, monkeypatch, packed_of):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = fill(get_peft_model(load(source), config(family)), std=0.1)
    before = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING):
        merged = model.merge_and_unload()
    assert "rounded to MXFP4 again: relative error" in caplog.text
    hf_mxfp4.assert_packed(merged)
    assert not lora_of(merged)
    parents = {type(m).__name__ for m in merged.modules()}
    assert not parents & {"ParamWrapper", "ExpertsAdapter"}
    for name, module in merged.named_modules():
        if not isinstance(module, hf_mxfp4.MXFP4Experts):
            continue
        wrapper = before.base_model.model.get_submodule(name)
        errors = norms = 0.0
        while isinstance(wrapper, adapters.ExpertsAdapter):
            proj = wrapper.parameter_name
            delta = wrapper.get_delta_weight("default").detach()
            wanted = wrapper.get_base_layer().packed(proj).dequantize() + (delta.mT if module.is_transposed else delta)
            assert module.packed(proj).dequantize().equal(hf_mxfp4.quantize(wanted).dequantize())
            errors += (module.packed(proj).dequantize() - wanted).norm() ** 2
            norms += wanted.norm() ** 2
            wrapper = wrapper.base_layer
        assert module.source.loss == pytest.approx(float(errors / norms) ** 0.5, rel=1e-4)
        assert 0.01 < module.source.loss < 0.12
    row = hf_mxfp4.packed_report(merged).rows[0]
    assert "merged with default and requantized: mse, ties even; relative error" in row.conversion
    assert row.loss == pytest.approx(packed_of(merged).popitem()[1].source.loss, rel=0.2)
    wanted = before(tokens).logits
    assert distance(merged(tokens).logits, wanted) < distance(before.unload()(tokens).logits, wanted)
    merged.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert same(bytes_of(again), bytes_of(merged))
    assert distance(again(tokens).logits, merged(tokens).logits) < 1e-6


def test_merge_keeps_the_scale_rule_of_the_model(sources, load):
    path = sources["qwen3_moe"]
    for rule in ("floor", "mse"):
        model = fill(get_peft_model(load(path, config=hf_mxfp4.MXFP4Config(scale_rule=rule)), config()))
        wrapper = model.base_model.model.model.layers[0].mlp.experts
        wanted = wrapper.get_base_layer().packed("down_proj").dequantize() + wrapper.get_delta_weight("default")
        merged = model.merge_and_unload().model.layers[0].mlp.experts
        blocks, scales = hf_mxfp4.quantize(wanted.detach(), scale_rule=rule)
        assert merged.packed("down_proj").blocks.equal(blocks)
        assert merged.packed("down_proj").scales.equal(scales)


def test_merged_and_taken_apart_again(sources, load, tokens):
    model = fill(get_peft_model(load(sources["qwen3_moe"]), config()), std=0.1)
    model.add_adapter("second", config())
    fill(model, seed=4, std=0.1)
    before, source = bytes_of(model), next(m for m in model.modules() if isinstance(m, hf_mxfp4.MXFP4Experts)).source
    logits = model(tokens).logits
    model.merge_adapter(["default"])
    model.merge_adapter(["second"])
    twice = bytes_of(model)
    assert not same(twice, before)
    model.unmerge_adapter()
    assert same(bytes_of(model), before)
    assert next(m for m in model.modules() if isinstance(m, hf_mxfp4.MXFP4Experts)).source == source
    assert torch.equal(model(tokens).logits, logits)
    model.merge_adapter(["default", "second"])
    assert same(bytes_of(model), twice), "rounded once, however many adapters there are"
    with model.disable_adapter():
        model(tokens)
        assert same(bytes_of(model), before)


def test_dense_with_adapters_after_dequantize(family, source, load, tokens):
    model = fill(get_peft_model(load(source), config(family)))
    wanted = model(tokens).logits
    model.base_model.model.dequantize()
    assert distance(model(tokens).logits, wanted) < 1e-5
    merged = model.merge_and_unload()
    assert not any(isinstance(m, hf_mxfp4.MXFP4Experts) for m in merged.modules())
    assert distance(merged(tokens).logits, wanted) < 1e-5


def test_several_adapters_switched_and_together(sources, pair, tokens):
    packed, dense = pair(sources["qwen3_moe"])
    base = packed(tokens).logits
    packed, dense = (get_peft_model(model, config()) for model in (packed, dense))
    for model in (packed, dense):
        model.add_adapter("second", config(r=8, use_rslora=True))
        fill(model, seed=7)
    seen = [base]
    for chosen in ("default", "second", ["default", "second"]):
        for model in (packed, dense):
            model.base_model.set_adapter(chosen)
        logits = packed(tokens).logits
        assert distance(logits, dense(tokens).logits) < 1e-5
        assert all(distance(logits, other) > 1e-2 for other in seen)
        seen.append(logits)
    with packed.disable_adapter():
        assert distance(packed(tokens).logits, base) < 1e-6
    packed.base_model.set_adapter("second")
    packed.delete_adapter("default")
    assert torch.equal(packed(tokens).logits, seen[2])
    assert distance(packed.unload()(tokens).logits, base) < 1e-6


def test_copies_and_pickles(sources, load, tokens):
    model = fill(get_peft_model(load(sources["qwen3_moe"]), config()))
    wanted = model(tokens).logits
    assert torch.equal(copy.deepcopy(model)(tokens).logits, wanted)
    experts = model.base_model.model.model.layers[0].mlp.experts
    assert type(pickle.loads(pickle.dumps(experts))) is adapters.ExpertsAdapter


def test_compiles_whole(sources, load, tokens):
    model = fill(get_peft_model(load(sources["qwen3_moe"]), config()))
    experts = model.base_model.model.model.layers[0].mlp.experts
    x, ids, weights = torch.randn(9, 64), torch.randint(0, 5, (9, 2)), torch.rand(9, 2)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    assert distance(compiled(x, ids, weights), experts(x, ids, weights)) < 1e-5


def test_what_peft_takes_for_all_linear_layers(sources, pair, tokens):
    packed, dense = (
        fill(get_peft_model(m, LoraConfig(r=4, target_modules="all-linear"))) for m in pair(sources["qwen3_moe"])
    )
    assert lora_of(packed).keys() == lora_of(dense).keys()
    assert distance(packed(tokens).logits, dense(tokens).logits) < 1e-5


def test_adapters_of_each_expert_as_transformers_4_had_them(sources, pair, tokens, tmp_path):
    LoraConfig(r=4, lora_alpha=8, target_modules=["w1", "w2", "w3", "q_proj"]).save_pretrained(tmp_path)
    generator, tensors = torch.Generator().manual_seed(0), {}
    shapes = {f"block_sparse_moe.experts.{e}.{w}": (96, 64) for e in range(4) for w in ("w1", "w3")}
    shapes |= {f"block_sparse_moe.experts.{e}.w2": (64, 96) for e in range(4)} | {"self_attn.q_proj": (64, 64)}
    for layer in range(2):
        for name, (rows, columns) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = 0.05 * torch.randn(4, columns, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = 0.05 * torch.randn(rows, 4, generator=generator)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    packed, dense = pair(sources["mixtral"])
    base = packed(tokens).logits
    packed, dense = (PeftModel.from_pretrained(model, tmp_path) for model in (packed, dense))
    assert distance(packed(tokens).logits, dense(tokens).logits) < 1e-5
    assert distance(packed(tokens).logits, base) > 0.1


def test_linear_layers_of_expert_lists():
    torch.manual_seed(0)
    packed = nn.Sequential(MXFP4Linear(nn.Linear(64, 96)), nn.SiLU(), MXFP4Linear(nn.Linear(96, 32, bias=False)))
    for layer in (packed[0], packed[2]):
        blocks, scales = hf_mxfp4.quantize(torch.randn(layer.out_features, layer.in_features))
        layer.weight_blocks.copy_(blocks)
        layer.weight_scales.copy_(scales)
    dense = nn.Sequential(packed[0].dequantize(), nn.SiLU(), packed[2].dequantize())
    options = {"target_modules": ["0", "2"], "target_parameters": None}
    packed, dense = (fill(get_peft_model(copy.deepcopy(m), config(**options)), std=0.2) for m in (packed, dense))
    x, before = torch.randn(7, 64), bytes_of(packed)
    packed(x).square().sum().backward()
    dense(x).square().sum().backward()
    for name, parameter in lora_of(packed).items():
        assert distance(parameter.grad, lora_of(dense)[name].grad) < 1e-5
    assert same(bytes_of(packed), before)
    wanted = packed(x)
    assert distance(wanted, dense(x)) < 1e-5
    with packed.disable_adapter():
        without = packed(x)
    packed.merge_adapter()
    assert 0 < distance(packed(x), wanted) < distance(without, wanted)
    for index in (0, 2):
        layer = dense.base_model.model[index]
        merged = layer.weight + layer.get_delta_weight("default")
        held = packed.base_model.model[index].base_layer.packed("weight")
        assert torch.equal(held.dequantize(), hf_mxfp4.quantize(merged.detach()).dequantize())
    packed.unmerge_adapter()
    assert same(bytes_of(packed), before)
    merged = packed.merge_and_unload()
    assert type(merged[0]) is MXFP4Linear
    assert "merged with default" in merged[0].source.conversion
    for wrong in ({"use_dora": True}, {"lora_bias": True}, {"init_lora_weights": "pissa"}):
        with pytest.raises(ValueError, match="MXFP4Linear"):
            get_peft_model(merged, config(**options, **wrong))


def test_experts_streamed_from_disk_are_refused(sources, load, tokens, tmp_path):
    model = get_peft_model(load(sources["qwen3_moe"]), config())
    accelerate.disk_offload(model, tmp_path, "cpu")
    hf_mxfp4.stream_experts(model)
    with pytest.raises(ValueError, match="streamed from disk is not supported"):
        model(tokens)


@pytest.mark.parametrize("wrong", ["experts.gate_up_proj_blocks", "mlp.experts.down_proj_scales"])
def test_packed_bytes_are_refused(sources, load, wrong):
    model = load(sources["qwen3_moe"])
    before = bytes_of(model)
    with pytest.raises(ValueError, match=rf"{wrong}', which are packed bytes.*name '(gate_up|down)_proj'"):
        get_peft_model(model, config(target_parameters=[wrong]))
    assert not lora_of(model)
    assert same(bytes_of(model), before)


@pytest.mark.parametrize("wrong", ["experts.gate_proj", "experts.0.down_proj", "mlp.experts.w1"])
def test_names_that_fit_nothing_in_the_experts_are_refused(sources, load, wrong):
    with pytest.raises(ValueError, match=f"{wrong}', which is no parameter of the model.*experts.gate_up_proj"):
        get_peft_model(
            load(sources["qwen3_moe"]), config(target_modules=["q_proj"], target_parameters=[BOTH[1], wrong])
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"lora_dropout": 0.1}, "lora_dropout"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' reads dense weights"),
        ({"init_lora_weights": "orthogonal"}, "init_lora_weights='orthogonal'"),
        ({"target_modules": ["experts"], "target_parameters": None}, "not supported"),
        ({"modules_to_save": ["experts"]}, "modules_to_save has 'experts', which holds model.layers.0.mlp.experts;"),
        ({"modules_to_save": ["mlp"]}, "modules_to_save has 'mlp'"),
    ],
)
def test_what_experts_cannot_have_is_refused(sources, load, options, message):
    with pytest.raises(ValueError, match=message):
        get_peft_model(load(sources["qwen3_moe"]), config(**options))


def test_offloaded_experts_are_refused(sources, load):
    model = accelerate.cpu_offload(load(sources["qwen3_moe"]), "cpu")
    with pytest.raises(ValueError, match="offloaded is not supported"):
        get_peft_model(model, config())


def test_weights_that_merge_to_no_number_change_nothing(sources, load):
    model = fill(get_peft_model(load(sources["qwen3_moe"]), config()))
    before = bytes_of(model)
    with torch.no_grad():
        model.base_model.model.model.layers[0].mlp.experts.lora_B["default"].weight[3] = math.inf
    with pytest.raises(ValueError, match="adapters merged into it"):
        model.base_model.model.model.layers[0].mlp.experts.merge()
    assert same(bytes_of(model), before)


# Training


def windows(path, count=8, length=64):
    text = (Path(path) / "held-out.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(path)(text[:20000]).input_ids
    rows = torch.tensor(ids[: count * length]).view(count, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def loss_of(model, data):
    model.eval()
    batch = torch.stack([row["input_ids"] for row in data])
    with torch.no_grad():
        logits = model(batch).logits.float()
    return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()))


def trainer(model, data, folder, **options):
    arguments = TrainingArguments(
        folder,
        max_steps=10,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        bf16=True,
        use_cpu=True,
        gradient_checkpointing=True,
        save_steps=5,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=data)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj", "o_proj"], "target_parameters": None},
        {"target_modules": []},
        {"target_modules": ["q_proj"]},
    ],
    ids=["attention", "experts", "both"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ten_steps_of_trainer(load, tmp_path, options, dtype):
    path = hf_mxfp4.demo_model_path()
    data = windows(path)

    def new():
        torch.manual_seed(0)
        return get_peft_model(load(path, dtype=dtype), config(r=8, lora_alpha=16, **options))

    model = new()
    packed, start = bytes_of(model), loss_of(model, data)
    run = trainer(model, data, tmp_path)
    run.train()
    end = loss_of(model, data)
    assert end < start - 0.1
    assert same(bytes_of(model), packed)
    assert (tmp_path / "checkpoint-5" / "adapter_model.safetensors").stat().st_size < 1_000_000

    resumed = new()
    trainer(resumed, data, tmp_path / "resumed").train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert loss_of(resumed, data) == pytest.approx(end, abs=1e-3)
    for name, parameter in lora_of(resumed).items():
        assert distance(parameter, lora_of(model)[name]) < 1e-2, name
