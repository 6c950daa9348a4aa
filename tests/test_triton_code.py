"""The Triton kernels compiled for GPUs that are not there, by compile_triton.py, and what the machine code has to have.

Every kernel in every configuration of the launch table. Instructions for a weight are those of the main loop that are
no matrix instructions; the limits are a tenth above what trials of such kernels had.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
IS_OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)

SCRIPT = Path(__file__).with_name("compile_triton.py")
GROUPS = (
    ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "gfx90a"),
    ("sm_100", "sm_120", "gfx942", "gfx950", "gfx1100", "gfx1201"),
)
TARGETS = [target for group in GROUPS for target in group]
SHARED = {
    "sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99,
    "gfx90a": 64, "gfx942": 64, "gfx950": 160, "gfx1100": 64, "gfx1201": 64,
}  # fmt: skip
"""KiB that a block may have."""

ROWS = 5.72
"""Instructions for a weight at most, without a matrix instruction."""

PER_WEIGHT = {
    "sm_75": (0, 0, None), "sm_80": (3.96, 5.06, None), "sm_86": (3.96, 5.06, None), "sm_89": (3.96, 5.06, None),
    "sm_90": (4.84, 4.84, None), "sm_100": (7.7, 7.7, 4.4), "sm_120": (3.74, 5.94, None), "gfx90a": (9.13, 9.13, None),
    "gfx942": (9.13, 9.13, None), "gfx950": (7.7, 9.9, 6.93), "gfx1100": (8.5, 9.3, None), "gfx1201": (8.0, 9.9, None),
}  # fmt: skip
"""The same beside matrix instructions: with 16 tokens or fewer a tile, more, and by `tl.dot_scaled`; bfloat16 alone."""


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    """What compile_triton.py found, for all targets, two of them at a time."""
    folder = tmp_path_factory.mktemp("codes")
    runs = []
    for number, group in enumerate(GROUPS):
        command = [sys.executable, str(SCRIPT), "--jobs", "1", "--json", str(folder / f"{number}.json"), "--targets"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        runs.append(subprocess.Popen([*command, *group], env=environment, stderr=subprocess.PIPE, text=True))
    for run in runs:
        errors = run.communicate()[1]
        assert run.returncode == 0, errors
    return [row for number in range(len(GROUPS)) for row in json.loads((folder / f"{number}.json").read_text())]


@pytest.mark.parametrize("target", TARGETS)
def test_machine_code(target, codes):
    own = [row for row in codes if row["target"] == target]
    assert own
    for row in own:
        what = f"{row['case']} {row['kernel']} for {target}"
        assert row["error"] is None, row["error"]
        assert row["spill_bytes"] == 0, f"{what} spills {row['spill_bytes']} bytes"
        assert row["shared_bytes"] <= SHARED[target] << 10, f"{what} needs {row['shared_bytes']} bytes of shared memory"
        assert row["tmem_columns"] <= 512, f"{what} needs {row['tmem_columns']} columns of tensor memory"
        assert row["instructions"] > 32, f"{what} is a trap"
        if row["kernel"].endswith(("projection", "_rows")):
            assert row["wide_loads"], f"{what} loads at most {row['widest_load']} bytes at a time"
        if row["kernel"].endswith("projection"):
            assert row["matrix_instructions"], f"{what} has no matrix instruction"


@pytest.mark.skipif(IS_OLD, reason="the limits are of Triton 3.9")
@pytest.mark.parametrize("target", TARGETS)
def test_instructions_for_a_weight(target, codes):
    few, many, scaled = PER_WEIGHT[target]
    seen = set()
    for row in codes:
        if row["target"] != target or not row["case"].endswith("gpt-oss-20b") or "gradient" in row["case"]:
            continue
        if row["kernel"].endswith(("projection", "_rows")):
            limit = few if row["block_tokens"] == 16 else many
            limit = scaled if " scaled " in row["case"] else limit
            limit = ROWS if row["kernel"].endswith("_rows") else limit
            assert row["per_weight"] is not None, row
            assert row["per_weight"] <= limit, f"{row['case']} {row['kernel']} for {target}"
            seen.add(row["kernel"])
    assert seen >= ({"first_rows"} if target == "sm_75" else {"first_projection", "second_projection"})
