"""Compiles Triton kernels for GPUs that are not there, and reads the machine code.

    python tests/compile_triton.py --targets sm_90 gfx942 --json codes.json

The kernels are launched as `configs/launch.json` has them, their arguments
specialised as Triton does when it launches, so that loads are as wide and offsets as narrow. Neither a GPU nor a
driver is needed. With TRITON_INTERPRET set Triton would not compile, so this runs in a process of its own, without it.

What a loop of machine code has in it is divided by the weights of a pass of the source's loop. Compilers unroll loops,
so passes are told by what they load: TTGIR, Triton's last form with tensors in it, says how many bytes every load
brings to a thread, and so do the machine's instructions. Loads for a later pass stand in the loop as often as others.
"""

from __future__ import annotations

import os

os.environ.pop("TRITON_INTERPRET", None)

import argparse
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

if TYPE_CHECKING:
    from hf_mxfp4.backends.triton import Launch


class Target(NamedTuple):
    """A GPU: Triton's three words for it, shared memory a block may have in bytes, and its matrix instruction."""

    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int
    matrix: str | None


TARGETS: dict[str, Target] = {
    "sm_75": Target("cuda", 75, 32, 64 << 10, None),
    "sm_80": Target("cuda", 80, 32, 163 << 10, r"HMMA"),
    "sm_86": Target("cuda", 86, 32, 99 << 10, r"HMMA"),
    "sm_89": Target("cuda", 89, 32, 99 << 10, r"HMMA"),
    "sm_90": Target("cuda", 90, 32, 227 << 10, r"HGMMA"),
    "sm_100": Target("cuda", 100, 32, 227 << 10, r"UTC\w*MMA"),
    "sm_120": Target("cuda", 120, 32, 99 << 10, r"HMMA|[OQ]MMA"),
    "gfx90a": Target("hip", "gfx90a", 64, 64 << 10, r"v_mfma"),
    "gfx942": Target("hip", "gfx942", 64, 64 << 10, r"v_mfma"),
    "gfx950": Target("hip", "gfx950", 64, 160 << 10, r"v_mfma"),
    "gfx1100": Target("hip", "gfx1100", 32, 64 << 10, r"v_wmma"),
    "gfx1201": Target("hip", "gfx1201", 32, 64 << 10, r"v_wmma"),
}
"""Matrix instructions by regular expression. Tiles too small for HGMMA or UTCHMMA are multiplied by HMMA there too."""


class CompileError(RuntimeError):
    """A launch that does not compile: which, for what, and the compiler's first message."""


@dataclasses.dataclass(frozen=True)
class Code:
    """What was read from machine code. Bytes and registers are a thread's, except `shared_bytes`."""

    registers: int
    spill_bytes: int  # of memory that a thread has for want of registers
    shared_bytes: int
    tmem_columns: int
    instructions: int  # padding left out
    matrix_instructions: int
    matrix_names: tuple[str, ...]
    widest_load: int  # bytes; of loads from global memory, as the next two
    wide_loads: int  # of 16 bytes or more
    loop_loads: dict[int, int]  # of the main loop: bytes to how many loads
    loop_instructions: int  # of the main loop, without matrix instructions
    unroll: int | None  # passes of the source's loop in one of the machine's; None if that cannot be told
    per_weight: float | None  # loop_instructions of all threads for one weight


class Program(NamedTuple):
    """Machine code: each instruction's name with its modifiers, and the indices of those that may be next."""

    names: list[str]
    successors: list[list[int]]
    registers: int
    spill_bytes: int


def specialise(launch: Launch, target: str) -> tuple[ASTSource, dict[str, Any]]:
    """What Triton would compile for a launch, and the options: types, divisibility, and constants among arguments."""
    backend = make_backend(GPUTarget(*TARGETS[target][:3]))
    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    values, specialization, _ = bind(**launch.arguments, **launch.constants)
    given = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    options, signature, constants, attributes = kernel._pack_args(backend, given, values, specialization, {})
    return ASTSource(kernel, signature, constants, attributes), vars(options)


@contextlib.contextmanager
def _contained(launch: Launch, target: str) -> Iterator[list[str]]:
    """Turns every error into one, and puts into a list what Python prints and compilers write to standard error."""
    text: list[str] = []
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                yield text
        except Exception as error:
            # Of many classes; what the compiler said is in it, or was written before.
            file.seek(0)
            found = re.search(r"^.*\b(?:error|fatal)\s*:.*$", f"{file.read()}\n{error}", re.MULTILINE)
            last = str(error).strip().rpartition("\n")[2]
            message = found[0].strip() if found else f"{type(error).__name__}: {last}"
            raise CompileError(f"{launch.kernel.__name__} does not compile for {target}: {message}") from error
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            text.append(file.read())


def compile(launch: Launch, target: str) -> Any:
    """Compiles a launch.

    Args:
        launch: a launch, whose tensors may be on the device "meta".
        target: a key of `TARGETS`.

    Returns:
        Triton's compiled kernel. For NVIDIA's, asm["ptxas"] has what ptxas said.

    Raises:
        CompileError: it does not compile.
    """
    with _contained(launch, target) as text, triton.knobs.nvidia.scope(), triton.knobs.compilation.scope():
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True  # of what the cache has there is no log
        source, options = specialise(launch, target)
        compiled = triton.compile(source, target=GPUTarget(*TARGETS[target][:3]), options=options)
    if "ptx" in compiled.asm:
        compiled.asm["ptxas"] = text[0]
    return compiled


def _read_nvidia(asm: dict[str, Any]) -> Program:
    """Reads what cuobjdump prints: /*0140*/ @!P0 BRA 0x2b0 ; of some GPUs with &wr=0x2 ?trans1 before the semicolon."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    text = re.sub(r"\s+[&?]\w+[\w=.{},]*", "", text)
    lines = re.findall(r"^\s+/\*([0-9a-f]+)\*/\s+(@\S+)?\s*(\S+?)(?:\s+(.*?))?\s*;", text, re.MULTILINE)
    index = {int(address, 16): i for i, (address, *_) in enumerate(lines)}
    successors = []
    reconverge: dict[str, int] = {}
    for i, (_, predicate, name, operands) in enumerate(lines):
        kind = name.partition(".")[0]
        jump = re.search(r"0x([0-9a-f]+)$", operands)
        place = index.get(int(jump[1], 16), i + 1) if jump else i + 1
        following = [i + 1]
        if kind == "BSSY":
            reconverge[operands.partition(",")[0]] = place
        elif kind == "BSYNC":
            following = [reconverge.get(operands, i + 1)]
        elif kind == "BRA":
            following = [place, i + 1] if predicate or "," in operands else [place]
        elif kind in ("EXIT", "RET", "BRX", "BRXU", "JMP"):
            following = [i + 1] if predicate else []
        successors.append([j for j in following if j < len(lines)])
    registers = re.findall(r"Used (\d+) registers", asm["ptxas"])
    spilled = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", asm["ptxas"])
    return Program([name for _, _, name, _ in lines], successors, int(registers[-1]), max(map(int, spilled)))


def _read_amd(text: str) -> Program:
    """Reads assembly: a tab, a name, operands; a label and a colon; at the end, a tab, a name and a colon, a number."""
    names: list[str] = []
    operands: list[str] = []
    labels: dict[str, int] = {}
    for line in text.partition("\n.Lfunc_end")[0].splitlines():
        if found := re.match(r"([.\w$]+):", line):
            labels[found[1]] = len(names)
        elif found := re.match(r"\t([a-z]\w*)\s*([^;]*)", line):
            names.append("spill_" * ("Folded" in line) + found[1])  # some GPUs reload as they load from global memory
            operands.append(found[2].strip())
    successors = []
    for i, name in enumerate(names):
        following = [] if name in ("s_branch", "s_endpgm", "s_setpc_b64") else [i + 1]
        if name.startswith(("s_branch", "s_cbranch")):
            following.append(labels[operands[i]])
        successors.append([j for j in following if j < len(names)])
    said = {name: int(value) for name, value in re.findall(r"^\s+\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    spilled = max(4 * (said["vgpr_spill_count"] + said["sgpr_spill_count"]), said["private_segment_fixed_size"])
    return Program(names, successors, said["vgpr_count"], spilled)


def _is_matrix(name: str) -> bool:
    return name.partition(".")[0].endswith("MMA") or name.startswith(("v_mfma", "v_smfmac", "v_wmma", "v_swmmac"))


def _load_bytes(name: str) -> int:
    """Bytes that an instruction loads from global memory, 0 for others."""
    if re.match(r"LDG(?:STS)?\b", name):
        bits = re.search(r"\.[US]?(8|16|64|128|256)(?=\.|$)", name)
        return int(bits[1]) // 8 if bits else 4
    found = re.match(r"(?:global|buffer|flat)_load_.*?(byte|short|dword(?:x\d)?|[uib]\d+)", name)
    words = {"byte": 8, "short": 16, "dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}
    return (words.get(found[1]) or int(found[1][1:])) // 8 if found else 0


def _reached(start: int, edges: list[list[int]]) -> set[int]:
    seen, waiting = {start}, [start]
    while waiting:
        for i in edges[waiting.pop()]:
            if i not in seen:
                seen.add(i)
                waiting.append(i)
    return seen


def _main_loop(program: Program) -> list[str]:
    """The instructions of the largest loop that has matrix instructions, or else that loads; none without a loop.

    A loop is all that can be reached from its head and from which the head can be reached. It is not what lies between
    a branch backwards and its aim: waiting for a barrier stands behind the kernel's end and goes back into the loop.
    """
    predecessors: list[list[int]] = [[] for _ in program.names]
    for i, following in enumerate(program.successors):
        for j in following:
            predecessors[j].append(i)
    heads = {j for i, following in enumerate(program.successors) for j in following if j < i}
    members = [_reached(head, program.successors) & _reached(head, predecessors) for head in heads]
    loops = [[program.names[i] for i in sorted(loop)] for loop in members]
    with_matrix = [loop for loop in loops if any(map(_is_matrix, loop))]
    with_load = [loop for loop in loops if any(map(_load_bytes, loop))]
    return max(with_matrix or with_load, key=len, default=[])


def _held(shape: list[int], layout: str, layouts: dict[str, str]) -> int:
    """How many different elements of a tensor one thread holds; 0 for layouts that loads hardly have."""
    sizes: list[int | None] = list(shape)
    while found := re.match(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>$", layout):
        sizes.insert(int(found[1]), None)
        layout = found[2]
    text = layouts.get(layout, "")
    lists = {name: json.loads(value) for name, value in re.findall(r"(\w+) = (\[\[.*?\]\]|\[[^\[]*?\])", text)}
    kept = [(i, size) for i, size in enumerate(sizes) if size is not None]
    if text.startswith("#ttg.linear"):
        return 1 << len({tuple(basis[i] for i, _ in kept) for basis in lists["register"]} - {(0,) * len(kept)})
    held = int(text.startswith("#ttg.blocked"))
    for i, size in kept if held else ():
        each = lists["sizePerThread"][i]
        held *= min(size, each * max(1, size // (each * lists["threadsPerWarp"][i] * lists["warpsPerCTA"][i])))
    return held


def _source_bytes(ttgir: str) -> int:
    """Bytes that a pass of the main loop loads from global memory into a thread; 0 if that cannot be told."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", ttgir, re.MULTILINE))
    nest = r"^( *)(?:%\S+ = )?scf\.(?:for|while)\b.*\n((?:\1 .*\n|\1\} do \{.*\n)*)"
    loops = [body for _, body in re.findall(nest, ttgir, re.MULTILINE)]
    most = 0
    for body in [body for body in loops if re.search(r"\w_dot |tt\.dot |\w_mma ", body)] or loops:
        total = 0
        for line in re.findall(r"(?:tt\.load|\w\.buffer_load\w*|ttg\.async_copy_global_to_local) .*", body):
            pointed = re.search(r"!tt\.ptr<[a-z]+(\d+)", line)
            tensor = re.search(r"tensor<((?:\d+x)+)(?:!tt\.ptr<)?[a-z]+(\d+)\w*>?, (#ttg\.slice<.*\}>|#\w+)", line)
            held = _held([int(size) for size in tensor[1].split("x")[:-1]], tensor[3], layouts) if tensor else 0
            if not tensor or not held:
                return 0
            total += held * int(pointed[1] if pointed else tensor[2]) // 8
        most = max(most, total)
    return most


def examine(compiled: Any, launch: Launch, target: str) -> Code:
    """Reads the machine code of a launch.

    Args:
        compiled: what `compile` made of it.
        launch: the launch; its constants BLOCK_ROWS and BLOCK_K are the weights of a pass of the main loop.
        target: a key of `TARGETS`.
    """
    asm = compiled.asm
    program = _read_nvidia(asm) if "cubin" in asm else _read_amd(asm["amdgcn"])
    matrix = [name for name in program.names if _is_matrix(name)]
    loads = [size for name in program.names if (size := _load_bytes(name))]
    loop = _main_loop(program)
    loop_loads = Counter(size for name in loop if (size := _load_bytes(name)))
    others = sum(not _is_matrix(name) for name in loop)
    loaded, source = sum(loop_loads.elements()), _source_bytes(asm["ttgir"])
    unroll = round(loaded / source) if source else 0
    if abs(loaded - unroll * source) > 0.1 * loaded:  # equal loads are merged, which may leave somewhat fewer
        unroll = 0
    weights = launch.constants.get("BLOCK_ROWS", 0) * launch.constants.get("BLOCK_K", 0) * unroll
    threads = launch.num_warps * TARGETS[target].warp_size
    return Code(
        registers=program.registers,
        spill_bytes=program.spill_bytes,
        shared_bytes=compiled.metadata.shared,
        tmem_columns=getattr(compiled.metadata, "tmem_size", None) or 0,
        instructions=sum(name not in ("NOP", "s_nop") for name in program.names),
        matrix_instructions=len(matrix),
        matrix_names=tuple(sorted(set(matrix))),
        widest_load=max(loads, default=0),
        wide_loads=sum(size >= 16 for size in loads),
        loop_loads=dict(sorted(loop_loads.items())),
        loop_instructions=others,
        unroll=unroll or None,
        per_weight=round(others * threads / weights, 2) if weights else None,
    )


def _cases(target: str) -> Iterator[tuple[str, Launch]]:
    """Every launch that the launch table has for a target: bfloat16 as in gpt-oss-20b, float32 as in Qwen3-30B-A3B.

    The first has rows that take turns, biases, and tails of K; the second has neither, activations of three parts, and
    any scale byte where the entry is for that.
    """
    import torch

    from hf_mxfp4 import configs
    from hf_mxfp4.activations import Activation
    from hf_mxfp4.backends import triton as launcher

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    gpt_oss = Activation(interleaved=True, alpha=1.702, gate_max=7.0, up_max=7.0, up_add=1.0)
    multiply = launcher.multiplication(target)
    for number, entry in enumerate(launcher.launch_table()[target]):
        config = launcher.Config(
            entry["route"], *(launcher.Tile(**entry[part]) for part in launcher.Config._fields[1:])
        )
        for name, activation, dtype, narrow in (
            ("gpt-oss-20b", gpt_oss, torch.bfloat16, True),
            ("qwen3-30b-a3b", Activation(), torch.float32, bool(entry.get("narrow"))),
        ):
            shape = configs.shape(name)
            experts, hidden, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size
            tokens = max(1, round(entry["tokens_per_expert"] * experts / shape.experts_per_token))
            first, second = (
                launcher.Projection(
                    empty(experts, features, width // 2),
                    empty(experts, features, width // 32),
                    empty(experts, features, dtype=torch.bfloat16) if shape.bias else None,
                )
                for features, width in ((2 * inner, hidden), (hidden, inner))
            )
            routes = (tokens, shape.experts_per_token)
            arguments = (empty(tokens, hidden, dtype=dtype), empty(*routes, dtype=torch.int64))
            if config.route != "dense":
                launches, _ = launcher.experts_launches(
                    *arguments,
                    empty(*routes, dtype=torch.float32),
                    first,
                    second,
                    activation,
                    config,
                    narrow=narrow,
                    multiply=multiply,
                )
                yield from ((f"{number} {config.route} {name}", launch) for launch in launches)
            if config.route in ("planes", "scaled") and dtype is torch.bfloat16:
                rows, offsets = empty(tokens, hidden, dtype=torch.float32), empty(experts + 1, dtype=torch.int64)
                packed = (second.blocks, second.scales, offsets)
                launches, _ = launcher.linear_launches(
                    rows, *packed, True, config, parts=1, narrow=True, multiply=multiply
                )
                yield from ((f"{number} gradient {name}", launch) for launch in launches)


@functools.cache
def _launches(target: str) -> list[tuple[str, Launch]]:
    return list(_cases(target))


def _key(target: str, case: int) -> str:
    """The same for launches that compile to the same."""
    launch = _launches(target)[case][1]
    try:
        with _contained(launch, target):
            source, options = specialise(launch, target)
            return f"{target} {source.hash()} {sorted(options.items())}"
    except CompileError:
        return f"{target} {case}"  # will be found again, and told


def _work(target: str, case: int) -> dict[str, Any]:
    """A launch's figures or its error, and the seconds it took; runs in a process of its own."""
    launch = _launches(target)[case][1]
    start = time.perf_counter()
    try:
        result = dataclasses.asdict(examine(compile(launch, target), launch, target))
    except CompileError as error:
        result = {"error": str(error)}
    return {**result, "seconds": round(time.perf_counter() - start, 2)}


def _work_all(tasks: Iterable[tuple[str, int]], jobs: int) -> dict[tuple[str, int], dict[str, Any]]:
    """Each task's result. A compiler may end its process: then the tasks left go one by one, to find whose fault."""
    results: dict[tuple[str, int], dict[str, Any]] = {}
    left = list(tasks)
    while left:
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            futures = {task: pool.submit(_work, *task) for task in left}
            for task, future in futures.items():
                with contextlib.suppress(BrokenProcessPool):
                    results[task] = future.result()
        left = [task for task in left if task not in results]
        if left and jobs == 1:
            target, case = task = left.pop(0)
            name = _launches(target)[case][1].kernel.__name__
            results[task] = {"error": f"{name} does not compile for {target}: the compiler ended its process"}
        jobs = 1
    return results


def main() -> None:
    """Writes a JSON list with an object for each case of each target; equal launches are compiled once."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    arguments = parser.parse_args()
    first: dict[str, tuple[str, int]] = {}
    same: dict[tuple[str, int], tuple[str, int]] = {}
    for target in arguments.targets:
        for case in range(len(_launches(target))):
            same[target, case] = first.setdefault(_key(target, case), (target, case))
    with tempfile.TemporaryDirectory() as cache:
        os.environ.update(TRITON_CACHE_DIR=cache, TMPDIR=cache)
        results = _work_all(first.values(), arguments.jobs)
    fields = [field.name for field in dataclasses.fields(Code)]
    rows = []
    for (target, case), task in same.items():
        name, launch = _launches(target)[case]
        row = {"target": target, "case": name, "kernel": launch.kernel.__name__}
        row |= {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        row["block_tokens"] = launch.constants.get("BLOCK_TOKENS")
        rows.append({**row, **dict.fromkeys([*fields, "error", "seconds"]), **results[task]})
    arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
