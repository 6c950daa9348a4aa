"""Every Python block of docs/formats.md runs, and its table of dialects is that of the code."""

import re
from pathlib import Path

import pytest
import torch

from hf_mxfp4.formats import DIALECTS

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
MXFP4 = [row for row in DIALECTS if not row.is_lossy]


def test_python_blocks_run_one_after_the_other():
    text = PAGE.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE))
    assert blocks
    assert all("assert " in block[1] for block in blocks)
    names = {}
    for block in blocks:
        blank = "\n" * text[: block.start(1)].count("\n")  # a traceback then names the line of the page
        exec(compile(blank + block[1], str(PAGE), "exec"), names)


@pytest.mark.parametrize("row", MXFP4, ids=lambda row: row.name)
def test_table_of_dialects_has_names_and_dtypes_of(row):
    line = table()[row.name]
    for ending, dtype, cell in zip(row.endings, row.dtypes, line, strict=False):
        name, dtypes = re.match(r"`([^`]*)` (\S+)", cell).groups()
        assert name.endswith(ending)
        assert dtypes == dtype
    shape = re.search(r"\[(.*)\]", line[0])[1].split(", ")
    assert len(shape) == row.dims


def test_table_of_dialects_has_no_others():
    assert set(table()) - {"gguf"} == {row.name for row in MXFP4} - {"gguf"}


def test_e8m0_is_lost_by_a_cast_as_the_page_says():
    scale = torch.tensor([120], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert scale.float().item() == 2**-7
    assert scale.to(torch.uint8).item() == 0


def table():
    """The rows under `## Dialects` by name, each the list of its other cells."""
    rows = re.findall(r"^\| (.*) \|$", PAGE.read_text().partition("\n## Dialects\n")[2], flags=re.MULTILINE)
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    return {name: rest for name, *rest in cells[1:] if not name.startswith("-")}
