"""torch.compile and torch.export take packed experts, and models with them, in one graph.

Whole models are the small trained one of the package, a Qwen3-MoE, and a tiny gpt-oss of random weights.
"""

import copy
import inspect
import io
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM, CompileConfig, GptOssConfig, StaticCache

import hf_mxfp4
from hf_mxfp4.experts import MXFP4Experts

FAMILIES = ["mixtral", "deepseek_v3", "gpt_oss", "nemotron_h", "muse_spark"]
NEEDS_COMPILER = pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="no C++ compiler")
COMPILERS = ["aot_eager", pytest.param("inductor", marks=NEEDS_COMPILER)]
each_backend = pytest.mark.parametrize("backend", ["auto", "reference"])


@pytest.fixture(autouse=True)
def fresh():
    """Nothing compiled is left over from other tests."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def experts(stock_experts):
    """experts(family, backend): H 96, I 64, so that no power of two divides a width."""

    def experts(family, backend="auto"):
        return MXFP4Experts.from_dense(stock_experts(family, 4, 96, 64), backend=backend).eval()

    return experts


def routes(count, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 96, generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(count)])
    return hidden, ids, torch.rand(count, 2, generator=generator)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By name, in float32 and packed."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
    # Transformers' static cache counts the tokens of a sliding window in Python, which compiles anew for each of them.
    sizes |= {"layer_types": ["full_attention"] * 2}
    config = GptOssConfig(**sizes, vocab_size=256, max_position_embeddings=128, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    random = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in random.parameters():
            parameter.normal_(std=0.15)
    folder = tmp_path_factory.mktemp("gpt_oss")
    random.save_pretrained(folder)
    options = {"dtype": torch.float32, "quantization_config": hf_mxfp4.MXFP4Config()}
    paths = {"demo": hf_mxfp4.demo_model_path(), "gpt_oss": folder}
    return {name: AutoModelForCausalLM.from_pretrained(path, **options).eval() for name, path in paths.items()}


@pytest.fixture(params=["demo", "gpt_oss"])
def model(request, models):
    return models[request.param]


@pytest.fixture
def tokens():
    return torch.randint(3, 250, (2, 13), generator=torch.Generator().manual_seed(5))


def close(got, expected):
    """Equal but for the order of sums, which a compiler may change outside of the experts."""
    return ((got - expected).norm() / expected.norm()).item() < 1e-5


# The ops


def test_every_op_is_checked_by_opcheck_somewhere():
    """`torch.library.opcheck` runs where an op's arguments are made, in the tests of ops and of each backend."""
    name = re.compile(r"^hf_mxfp4::(\w+)", re.MULTILINE)
    registered = {found[1] for op in torch._C._dispatch_get_all_op_names() if (found := name.match(op))}
    checked = re.compile(r"opcheck\(\s*torch\.ops\.hf_mxfp4\.(\w+)\.default")
    by_file = {path.name: set(checked.findall(path.read_text())) for path in Path(__file__).parent.glob("test_*.py")}
    assert registered == {"grouped_linear", "experts_mlp"}
    for backend, ops in {"ops": {"grouped_linear"}, "native": registered, "triton": registered}.items():
        assert by_file[f"test_{backend}.py"] == ops


# One experts module


@each_backend
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_one_graph(family, backend, experts):
    packed = experts(family, backend)
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(*routes(9)), packed(*routes(9)))


@NEEDS_COMPILER
@pytest.mark.parametrize(("family", "backend"), [("gpt_oss", "auto"), ("deepseek_v3", "reference")])
def test_inductor_compiles_experts(family, backend, experts):
    packed = experts(family, backend)
    with torch.no_grad():
        assert close(torch.compile(packed, fullgraph=True)(*routes(9)), packed(*routes(9)))


@NEEDS_COMPILER
def test_gradients_go_through_the_compiled_graph(experts):
    packed = experts("gpt_oss")
    grads = []
    for module in (packed, torch.compile(packed, fullgraph=True, backend="inductor")):
        hidden, ids, weights = routes(9)
        hidden.requires_grad_()
        weights.requires_grad_()
        grads.append(torch.autograd.grad(module(hidden, ids, weights).square().sum(), (hidden, weights)))
    assert all(close(got, expected) for got, expected in zip(*grads, strict=True))


def test_a_number_of_tokens_that_changes_compiles_twice_at_most(experts):
    """Once for the first and once for any; as does a layer that is dense."""
    packed, counter = experts("mixtral"), CompileCounter()
    compiled = torch.compile(packed, fullgraph=True, backend=counter)
    with torch.no_grad():
        for count in (3, 4, 9, 33, 128):
            assert torch.equal(compiled(*routes(count)), packed(*routes(count)))
    assert counter.frame_count == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_other_experts_and_weights_need_no_other_graph(family, experts):
    packed = experts(family)
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        compiled(*routes(5))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for seed in range(1, 5):
                assert torch.equal(compiled(*routes(5, seed=seed)), packed(*routes(5, seed=seed)))


@each_backend
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_export_for_any_number_of_tokens(family, backend, experts):
    packed, count = experts(family, backend), torch.export.Dim("tokens", max=1024)
    with torch.no_grad():
        program = torch.export.export(packed, routes(9), dynamic_shapes=({0: count}, {0: count}, {0: count}))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    held = {name: parameter.dtype for name, parameter in program.state_dict.items() if "_blocks" in name}
    assert held
    assert set(held.values()) == {torch.uint8}
    with torch.no_grad():
        for tokens in (2, 9, 40):
            assert torch.equal(loaded(*routes(tokens)), packed(*routes(tokens)))


# A whole model


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_forward_is_one_graph(models, tokens, compiler):
    model = models["gpt_oss" if compiler == "inductor" else "demo"]
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    with torch.no_grad():
        assert close(compiled(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)


def test_a_training_step_is_one_graph(models, tokens):
    grads = []
    for compile in (False, True):
        model = copy.deepcopy(models["gpt_oss"]).train()
        forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compile else model
        forward(tokens, labels=tokens, use_cache=False).loss.backward()
        grads.append(model.get_input_embeddings().weight.grad)
    assert bool(grads[0].any())
    assert close(*grads)


def test_no_token_after_the_first_compiles_anything(model, tokens):
    """Steps of one token each with a static cache: one graph for all of them."""
    counter, cache = CompileCounter(), StaticCache(config=model.config, max_cache_len=40)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        out = model(tokens, **{name: cache}, use_cache=True)
        eager = copy.deepcopy(cache)
        for step in range(10):
            following = out.logits[:, -1:].argmax(-1)
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                out = compiled(following, **{name: cache}, use_cache=True)
            assert close(out.logits, model(following, **{name: eager}, use_cache=True).logits)
    assert counter.frame_count == 1


@pytest.mark.parametrize("compiler", COMPILERS)
def test_generates_with_a_static_cache_and_a_compiled_step(models, tokens, compiler):
    """As `generate` compiles on a GPU, which it does on a CPU only if told to."""
    model = models["gpt_oss" if compiler == "inductor" else "demo"]
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    expected = model.generate(tokens, **options)
    assert torch.equal(model.generate(tokens, **options, cache_implementation="static"), expected)
    config = CompileConfig(fullgraph=True, backend=compiler, mode=None, dynamic=False)
    config._compile_all_devices = True
    torch._dynamo.utils.counters.clear()
    options |= {"cache_implementation": "static", "compile_config": config}
    assert torch.equal(model.generate(tokens, **options), expected)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(model.generate(tokens, **options), expected)


def test_a_model_exports(model, tokens):
    with torch.no_grad():
        program = torch.export.export(model, (tokens,), {"use_cache": False})
        assert torch.equal(program.module()(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)
    ops = {node.target for node in program.graph.nodes if "hf_mxfp4" in str(node.target)}
    assert ops
    assert not any(w.dtype is not torch.uint8 for name, w in program.state_dict.items() if name.endswith("_blocks"))
