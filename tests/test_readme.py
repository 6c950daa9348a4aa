"""Every block of the README runs; its first two shell blocks are what .ci/run runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_python_blocks_run_one_after_the_other(tmp_path):
    code = "\n".join(blocks("python"))
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    generated = result.stdout.partition("\nmodule ")[0]
    assert len(generated) > len("ROMEO.\n") + 20, result.stdout
    assert "4.25" in result.stdout


def test_first_two_shell_blocks_are_the_demo_and_the_tests_and_ci_runs_them():
    first, second, *_ = blocks("sh")
    assert "hf-mxfp4 demo" in first
    assert "pytest" in second
    ci = (ROOT / ".ci" / "run").read_text()
    assert "block 1" in ci
    assert "block 2" in ci
    assert all(len(block.strip().splitlines()) == 1 for block in (first, second))


@pytest.mark.parametrize("block", blocks("sh")[2:])
def test_other_shell_blocks_run(block):
    command = block.strip().replace(".venv/bin", str(Path(sys.executable).parent))
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_path_that_the_readme_names_exists():
    paths = re.findall(r"`((?:hf_mxfp4|configs|examples|benchmarks|tests)/[^`]*)`", README)
    links = re.findall(r"\]\(([^)h][^)]*)\)", README)
    assert len(paths) > 10
    assert links
    for name in paths + links:
        assert (ROOT / name).exists(), name
