"""Building the native kernels: without a compiler, from an sdist, with other compilers, and for other processors.

What is built runs through its C interface (native_check.cpp) and is compared with float64 over decoded weights.
"""

import os
import platform
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import setuptools
import torch

from hf_mxfp4 import quantize
from hf_mxfp4.backends import cpu

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "hf_mxfp4" / "backends" / "native"
CHECK = Path(__file__).parent / "native_check.cpp"
X86 = platform.machine().lower() in ("x86_64", "amd64")
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="the sources are not beside the tests")


def needs(*commands):
    missing = [command for command in commands if shutil.which(command) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="module")
def flags():
    """flags(stem, machine) -> what setup.py gives the compiler for a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **options: None)
        tables = runpy.run_path(str(ROOT / "setup.py"))

    def flags(stem, machine="x86_64"):
        return [*tables["COMMON"], *(tables["X86_64"].get(stem, []) if machine == "x86_64" else [])]

    return flags


def copy_sources(tree):
    """What the package is built from, with nothing that was built."""
    tree.mkdir()
    ignore = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__", "build", "native_failure.txt", "*.safetensors")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "hf_mxfp4", "configs"):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, tree / name, ignore=ignore)
        elif path.exists():
            shutil.copy(path, tree / name)
    return tree


@pytest.fixture
def source_tree(tmp_path):
    return copy_sources(tmp_path / "tree")


def setup_py(tree, *arguments, **environment):
    result = subprocess.run(
        [sys.executable, "setup.py", *arguments],
        cwd=tree,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


# Without a compiler


@pytest.mark.parametrize("in_place", [False, True], ids=["into a folder", "in place"])
def test_a_compiler_that_is_missing_leaves_the_reason_and_nothing_fails(in_place, source_tree):
    backends = source_tree / "hf_mxfp4" / "backends"
    if in_place:
        (backends / "_native.abi3.so").write_bytes(b"of an earlier build")
        arguments = ["build_ext", "--inplace"]
    else:
        arguments = ["build_ext", "--build-lib", "lib", "--build-temp", "temp"]
        backends = source_tree / "lib" / "hf_mxfp4" / "backends"
    said = setup_py(source_tree, *arguments, CC="/nonexistent/cc", CXX="/nonexistent/c++")
    reason = (backends / "native_failure.txt").read_text(encoding="utf-8")
    assert "could not be built" in reason
    assert "/nonexistent/c" in reason
    assert "the native kernel is left out" in said
    assert not list(backends.glob("_native*.so"))


def names_in(library):
    """The instruction sets that a library has."""
    code = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); library.mxfp4_name.restype = ctypes.c_char_p;"
        "print(*(library.mxfp4_name(i).decode() for i in range(library.mxfp4_count())))"
    )
    command = [sys.executable, "-c", code, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@needs("g++")
@pytest.mark.skipif(not X86, reason="flags of x86-64")
def test_a_compiler_that_is_too_old_for_an_instruction_set_builds_the_others(source_tree, tmp_path):
    compiler = tmp_path / "old-c++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *avx512bf16*) echo "unknown flag" >&2; exit 1;; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    arguments = ["build_ext", "--build-lib", "lib", "--build-temp", "temp"]
    said = setup_py(source_tree, *arguments, CC=str(compiler), CXX=str(compiler))
    assert "isa_avx512_bf16 is left out of the native kernel" in said
    folder = source_tree / "lib/hf_mxfp4/backends"
    assert [path.name for path in folder.iterdir()] == ["_native.abi3.so"]
    assert names_in(folder / "_native.abi3.so") == ["avx512", "avx2", "scalar"]


@pytest.fixture(scope="module")
def built_here(tmp_path_factory):
    """A tree in which setup.py has built into `lib` and `temp`, where there was a reason of an earlier build."""
    tree = copy_sources(tmp_path_factory.mktemp("built") / "tree")
    folder = tree / "lib" / "hf_mxfp4" / "backends"
    folder.mkdir(parents=True)
    (folder / "native_failure.txt").write_text("of an earlier build")
    setup_py(tree, "build_ext", "--build-lib", "lib", "--build-temp", "temp", CC="gcc", CXX="g++")
    return tree


@needs("g++")
def test_a_build_that_works_takes_an_old_reason_away_and_gives_one_plain_library(built_here):
    folder = built_here / "lib" / "hf_mxfp4" / "backends"
    assert [path.name for path in folder.iterdir()] == ["_native.abi3.so"]
    names = names_in(folder / "_native.abi3.so")
    assert names == (["avx512_bf16", "avx512", "avx2", "scalar"] if X86 else ["neon", "scalar"])


def test_an_sdist_has_every_source(source_tree):
    setup_py(source_tree, "sdist", "--formats=gztar", "--dist-dir", "dist")
    (archive,) = (source_tree / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    needed = {f"hf_mxfp4/backends/native/{path.name}" for path in NATIVE.iterdir()}
    assert {Path(name).suffix for name in needed} == {".cpp", ".h", ".inc"}
    assert needed | {"setup.py", "pyproject.toml", "hf_mxfp4/backends/cpu.py"} <= names
    assert not [name for name in names if name.endswith((".so", "native_failure.txt"))]


# With another compiler


@pytest.mark.parametrize("stem", sorted(path.stem for path in NATIVE.glob("*.cpp")))
@pytest.mark.parametrize("compiler", ["g++", "clang++", "clang++-14"])
def test_every_file_compiles_without_a_warning(compiler, stem, flags):
    if shutil.which(compiler) is None:
        pytest.skip(f"not installed: {compiler}")
    command = [compiler, *flags(stem), "-Wall", "-Wextra", "-fsyntax-only", str(NATIVE / f"{stem}.cpp")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not [line for line in result.stderr.splitlines() if "error:" in line or "warning:" in line]


# What is built, through its C interface


class Case(NamedTuple):
    """Inputs of native_check: E experts, H hidden, I intermediate size, rows of each expert, T tokens of k experts."""

    experts: int
    hidden: int
    intermediate: int
    counts: tuple[int, ...]
    tokens: int
    top_k: int
    groups: int
    room: int


SMALL = Case(3, 96, 32, (1, 0, 4), 5, 2, 40, 1 << 20)
LARGER = Case(4, 160, 96, (13, 0, 1, 7), 33, 3, 5000, 7 * 3 * 160 * 4)  # tokens in batches, groups for two threads


def make_input(case, path):
    generator = np.random.default_rng(0)
    inner, rows = 2 * case.intermediate, sum(case.counts)

    def packed(features, width):
        codes = generator.integers(256, size=(case.experts, features, width // 2), dtype=np.uint8)
        scales = generator.integers(118, 125, size=(case.experts, features, width // 32), dtype=np.uint8)
        scales[generator.random(scales.shape) < 0.02] = 5  # which takes another path, and adds next to nothing
        return codes, scales

    def numbers(*shape):
        """Float32 numbers that bfloat16 holds."""
        values = generator.standard_normal(shape).astype(np.float32)
        return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)

    first, second = packed(inner, case.hidden), packed(case.hidden, case.intermediate)
    arrays = {
        "first": first,
        "second": second,
        "offsets": np.cumsum([0, *case.counts], dtype=np.int64),
        "x": numbers(rows, case.hidden),
        "g": numbers(rows, inner),
        "token": numbers(case.tokens, case.hidden),
        "ids": generator.integers(-1, case.experts + 1, size=(case.tokens, case.top_k)),
        "weights": numbers(case.tokens, case.top_k),
        "first_bias": numbers(case.experts, inner),
        "second_bias": numbers(case.experts, case.hidden),
        "dense": (
            generator.standard_normal((case.groups, 32)) * 2.0 ** generator.integers(-140, 120, (case.groups, 1))
        ),
    }
    arrays["dense"] = arrays["dense"].astype(np.float32)
    sizes = (case.experts, case.hidden, case.intermediate, rows, case.tokens, case.top_k, case.groups, case.room)
    with path.open("wb") as file:
        file.write(np.array(sizes, dtype=np.int64).tobytes())
        for value in arrays.values():
            for part in value if isinstance(value, tuple) else (value,):
                file.write(np.ascontiguousarray(part).tobytes())
    return arrays


def round_int8(x):
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    step = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127)
    return (np.round(groups / np.where(step > 0, step, 1)) * step).reshape(x.shape)


def exact_experts(case, arrays, first, second, rounded):
    out = np.zeros((case.tokens, case.hidden))
    for t in range(case.tokens):
        for e, weight in zip(arrays["ids"][t], arrays["weights"][t], strict=True):
            if not 0 <= e < case.experts:
                continue
            outputs = first[e] @ rounded(arrays["token"][t]) + arrays["first_bias"][e]
            gate, up = outputs[::2].clip(max=7), outputs[1::2].clip(-7, 7)
            h = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            out[t] += weight * (second[e] @ rounded(h) + arrays["second_bias"][e])
    return out


def relative(got, exact):
    return np.linalg.norm(got - exact) / np.linalg.norm(exact)


def check_output(case, arrays, path, decode, names):
    """Every output of every instruction set, against float64."""
    first, second = (decode(*(torch.from_numpy(part) for part in arrays[name])).numpy() for name in ("first", "second"))
    by_row = np.repeat(first, case.counts, axis=0)
    forward = {8: np.einsum("snk,sk->sn", by_row, round_int8(arrays["x"]).astype(np.float64))}
    forward[16] = np.einsum("snk,sk->sn", by_row, arrays["x"].astype(np.float64))
    transposed = np.einsum("snk,sn->sk", by_row, arrays["g"].astype(np.float64))
    experts = {8: exact_experts(case, arrays, first, second, lambda v: round_int8(v[None])[0].astype(np.float64))}
    experts[16] = exact_experts(case, arrays, first, second, lambda v: v.astype(np.float64))
    quantized = quantize(torch.from_numpy(arrays["dense"]))
    with path.open("rb") as file:

        def take(dtype, *shape):
            return np.frombuffer(file.read(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype=dtype).reshape(shape)

        for name in names:
            assert file.read(16).rstrip(b"\0").decode() == name
            for operand in ("float32", "bfloat16", "int8"):
                bits = 8 if operand == "int8" else 16
                coarse = operand == "bfloat16" and name in ("avx2", "avx512_bf16")
                off = relative(take(np.float32, *forward[16].shape), forward[bits])
                assert off <= (2e-4 if coarse else 2e-6), (name, operand, "forward", off)
                off = relative(take(np.float32, *transposed.shape), transposed)
                assert off <= 2e-6, (name, operand, "transposed", off)
                off = relative(take(np.float32, case.tokens, case.hidden), experts[bits])
                assert off <= (2.6e-3 if coarse else 1e-3 if bits == 8 else 2e-6), (name, operand, "experts", off)
                halves = take(np.uint16, case.tokens, case.hidden).astype(np.uint32) << 16
                off = relative(halves.view(np.float32), experts[bits])
                assert off <= 4e-3, (name, operand, "experts in bfloat16", off)
            assert np.array_equal(take(np.uint8, case.groups), quantized.scales.flatten().numpy())
            assert np.array_equal(take(np.uint8, case.groups, 16), quantized.blocks.numpy())
        assert not file.read()


@pytest.fixture(scope="module")
def build(flags, tmp_path_factory):
    """build(compiler, files, more flags, machine) -> native_check with these files, and the folder of their objects."""

    def build(compiler, stems, more=(), machine="x86_64"):
        folder = tmp_path_factory.mktemp("built")
        for stem in stems:
            source, target = NATIVE / f"{stem}.cpp", folder / f"{stem}.o"
            subprocess.run([compiler, *flags(stem, machine), *more, "-c", str(source), "-o", str(target)], check=True)
        if "isa_avx512" not in stems and machine == "x86_64":
            (folder / "absent.cpp").write_text(ABSENT)
            stems = [*stems, str(folder / "absent.cpp")]
        parts = [stem if stem.endswith(".cpp") else str(folder / f"{stem}.o") for stem in stems]
        command = [compiler, *flags("", machine), *more, f"-I{NATIVE}", str(CHECK), *parts]
        subprocess.run([*command, "-o", str(folder / "native_check")], check=True)
        return folder

    return build


ABSENT = """
#include "native.h"
namespace mxfp4 {
static bool no() { return false; }
const Kernels kAvx512Bf16 = {"avx512_bf16", no}, kAvx512 = {"avx512", no};
}
"""
"""Stands for the kernels of instruction sets that are left out."""


@pytest.fixture
def check(tmp_path, decode):
    """check(case, folder, how to run programs, instruction sets) runs native_check and compares what comes out."""

    def check(case, folder, names, run=(), **environment):
        arrays = make_input(case, tmp_path / "in")
        command = [*run, str(folder / "native_check"), str(tmp_path / "in"), str(tmp_path / "out")]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | environment)
        assert result.returncode == 0, f"status {result.returncode}: {result.stdout}{result.stderr}"
        check_output(case, arrays, tmp_path / "out", decode, names)

    return check


def usable_here():
    library = cpu._library()
    if isinstance(library, str):
        pytest.skip(f"no native library: {library}")
    return [library.mxfp4_name(i).decode() for i in range(library.mxfp4_count()) if library.mxfp4_usable(i)]


X86_FILES = ("driver", "isa_avx512_bf16", "isa_avx512", "isa_avx2", "isa_scalar")
CASES = pytest.mark.parametrize("case", [SMALL, LARGER], ids=["small", "larger"])
FOR_X86 = pytest.mark.skipif(not X86, reason="for x86-64")


@pytest.fixture(scope="module")
def check_here(built_here, flags):
    """The folder of native_check with the objects that setup.py made."""
    objects = sorted(map(str, (built_here / "temp").rglob("*.o")))
    command = ["g++", *flags(""), f"-I{NATIVE}", str(CHECK), *objects, "-o", str(built_here / "native_check")]
    subprocess.run(command, check=True)
    return built_here


@FOR_X86
@needs("g++")
@CASES
def test_no_instruction_set_reads_or_writes_past_an_array(case, check_here, check):
    """The page behind each array cannot be touched."""
    check(case, check_here, usable_here())


@FOR_X86
@needs("g++", "nm")
def test_no_code_is_shared_between_instruction_sets(built_here):
    """Of a weak function, linkers keep one copy, which could be the one that the processor at hand cannot run."""
    for stem in X86_FILES[1:]:
        (built,) = (built_here / "temp").rglob(f"{stem}.o")
        command = ["nm", "-C", "--defined-only", str(built)]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        symbols = [line.split(maxsplit=2)[1:] for line in listed.splitlines()]
        kernels = "k" + "".join(part.capitalize() for part in stem.split("_")[1:])
        assert [name for kind, name in symbols if kind not in "bdrtn"] == [f"mxfp4::{kernels}"]


@FOR_X86
@needs("g++")
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(kind, build, check):
    """In what all instruction sets share, and in the vectors of AVX2."""
    probe = ["g++", f"-fsanitize={kind}", "-x", "c++", "-", "-o", "/dev/null"]
    if subprocess.run(probe, input=b"int main() {}", capture_output=True).returncode:
        pytest.skip(f"g++ has no -fsanitize={kind} here")
    more = ["-O1", "-g", f"-fsanitize={kind}", "-fno-sanitize-recover=all"]
    folder = build("g++", ("driver", "isa_avx2", "isa_scalar"), more)
    names = [name for name in usable_here() if name in ("avx2", "scalar")]
    check(SMALL, folder, names, ASAN_OPTIONS="detect_leaks=0", TSAN_OPTIONS="halt_on_error=1", LD_PRELOAD="")


@FOR_X86
@needs("clang++-14")
def test_clang_builds_kernels_that_are_right(build, check):
    folder = build("clang++-14", X86_FILES)
    for case in (SMALL, LARGER):
        check(case, folder, usable_here())


@pytest.fixture(scope="module")
def built_for_arm(build):
    return build("aarch64-linux-gnu-g++", ("driver", "isa_neon", "isa_scalar"), ["-static"], "aarch64")


@needs("aarch64-linux-gnu-g++", "qemu-aarch64")
@CASES
def test_neon_and_portable_kernels_on_an_emulated_arm_processor(case, built_for_arm, check):
    check(case, built_for_arm, ["neon", "scalar"], ["qemu-aarch64"])
