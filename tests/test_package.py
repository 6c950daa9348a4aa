"""What is installed: the wheel's contents, the configs, and imports that stay light and offline."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hf_mxfp4
from hf_mxfp4 import configs

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(ROOT),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return next(folder.glob("*.whl"))


def test_wheel_holds_the_model_the_text_and_the_configs(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    model = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "held-out.txt")
    assert {f"hf_mxfp4/demo_model/{name}" for name in model} <= names
    assert {"hf_mxfp4/configs/shapes.json", "hf_mxfp4/configs/recipes.json", "hf_mxfp4/py.typed"} <= names
    assert not any(name.startswith(("tests", "benchmarks", "configs")) for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_configs_are_read_from_an_installed_wheel(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import json, hf_mxfp4, hf_mxfp4.configs as c\n"
        "names = ['gpt-oss-20b', 'qwen3-30b-a3b', 'kimi-k3', 'tiny']\n"
        "print(json.dumps([hf_mxfp4.__file__, {n: c.shape(n) for n in names}, c.recipe('experts-only')]))\n"
    )
    # -S leaves out site-packages and with it the development install; the dependencies are put back by hand
    paths = [str(tmp_path), *(path for path in sys.path if path.endswith("site-packages"))]
    code = f"import sys; sys.path[:0] = {paths}\n{code}"
    result = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    file, shapes, recipe = json.loads(result.stdout)
    assert file.startswith(str(tmp_path))
    assert shapes["gpt-oss-20b"][:5] == [24, 32, 4, 2880, 2880]
    assert shapes["qwen3-30b-a3b"][:5] == [48, 128, 8, 2048, 768]
    assert shapes["kimi-k3"][:5] == [92, 896, 16, 3584, 3072]
    assert hf_mxfp4.MXFP4Config(**recipe).scale_rule == "mse"


def test_shapes_agree_with_the_models_they_name():
    config = json.loads((Path(hf_mxfp4.demo_model_path()) / "config.json").read_text())
    tiny = configs.shape("tiny")
    assert tiny.hidden_size == config["hidden_size"]
    assert tiny.intermediate_size == config["moe_intermediate_size"]
    assert (tiny.layers, tiny.num_experts) == (config["num_hidden_layers"], config["num_local_experts"])
    assert tiny.weights_per_layer * tiny.layers == 294_912
    # Published sizes: an expert of Kimi K3 is 17,547,264 bytes, a layer of gpt-oss-20b about 420 MB.
    kimi = configs.shape("kimi-k3")
    assert kimi.weights_per_layer // kimi.num_experts * 17 // 32 == 17_547_264
    assert 0.41e9 < configs.shape("gpt-oss-20b").weights_per_layer * 17 // 32 < 0.43e9


def test_unknown_names_list_the_known():
    with pytest.raises(KeyError, match="gpt-oss-20b, qwen3-30b-a3b"):
        configs.shape("gpt-5")
    with pytest.raises(KeyError, match="experts-only"):
        configs.recipe("everything")


def test_import_loads_no_gpu_code_and_opens_no_socket():
    code = (
        "import socket, sys\n"
        "socket.socket.connect = socket.getaddrinfo = lambda *a, **k: sys.exit('a socket was used')\n"
        "import hf_mxfp4\n"
        # torch._dynamo, which Transformers imports, imports Triton where it is installed
        "names = 'hf_mxfp4.backends.triton_kernels', 'kernels', 'gguf', 'compressed_tensors', 'ml_dtypes'\n"
        "bad = [m for m in names if m in sys.modules]\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_public_surface_is_there():
    for name in hf_mxfp4.__all__:
        assert getattr(hf_mxfp4, name) is not None
    assert issubclass(hf_mxfp4.NotPackedError, RuntimeError)
    assert issubclass(hf_mxfp4.CheckpointError, ValueError)
