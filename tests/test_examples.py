"""The examples: each runs on a CPU without a network, says what it should, is short, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS_NETWORK = "real_checkpoint.py"
OUTPUTS = {
    "device_map.py": [
        "in MXFP4: model.embed_tokens, lm_head, model.layers.0 in memory",
        "the tokens are those of the whole model in memory",
        "in bfloat16: nothing in memory",
    ],
    "expert_linear.py": ["expert 1: [2.0, 4.0, 2.0, 4.0]", "y: [140.0, 96.0, 32.0]"],
    "gpt_oss_layout.py": [
        "gate_up_proj_blocks U8   [4, 128, 2, 16]",
        "gate_up_proj_scales U8   [4, 128, 2]",
        "Transformers' own reader decodes the file to the same weights",
    ],
    "load_and_generate.py": ["294,912 expert weights in 0.157 MB, 4.25 bits each", "generated: MACBETH."],
    "parallel.py": ["0.078 MB of packed experts in each process", "the same tokens as one process: True"],
    "lora.py": ["trainable params: ", "step 0: loss 3.", "merged with default and requantized: mse", "merged: loss "],
    "pipeline.py": ["--- 'The king is'", "the pipeline ran on packed experts"],
    "streaming.py": ["3 layers kept at most 4 experts each in memory", "experts that were needed were in memory"],
    "quantize_and_save.py": ["156,672 packed bytes are equal after save and reload"],
}


def test_every_example_is_listed() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*OUTPUTS, NEEDS_NETWORK}


@pytest.mark.parametrize("name", [*OUTPUTS, NEEDS_NETWORK])
def test_is_short_and_compiles(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) < 40
    compile(text, name, "exec")


@pytest.mark.parametrize("name", OUTPUTS)
def test_runs_offline_and_says_what_it_should(name: str, tmp_path: Path) -> None:
    work, temporary = tmp_path / "work", tmp_path / "temporary"
    work.mkdir()
    temporary.mkdir()
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=work,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    for piece in OUTPUTS[name]:
        assert piece in ran.stdout
    assert not list(work.iterdir()), "an example writes to temporary folders only"
    assert not list(temporary.rglob("*.safetensors")), "an example removes its temporary folders"
