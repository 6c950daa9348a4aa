"""Builds the native CPU kernels where a C++ compiler is there; without them the package works in plain torch.

Everything else is in pyproject.toml. The library has a plain C interface and is opened with ctypes, so that neither
torch nor Python's headers are needed to build it, and one build fits every Python version.
"""

import platform
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError, LinkError, PlatformError

NATIVE = Path("hf_mxfp4/backends/native")
FAILURE = "native_failure.txt"
COMMON = ["-O3", "-std=c++17", "-pthread", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off", "-g0"]
AVX2 = ["-mavx2", "-mfma", "-mbmi", "-mbmi2"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
X86_64 = {
    "isa_avx2": AVX2,
    "isa_avx512": AVX512,
    "isa_avx512_bf16": [*AVX512, "-mavx512vbmi", "-mavx512vnni", "-mavx512bf16"],
}
"""Compiler flags of the files that are for one instruction set. Which of them runs is found out at run time."""


class BuildNative(build_ext):
    """Compiles each file with its own flags. What fails is written to a file beside the library, and nothing stops."""

    def build_extension(self, ext: Extension) -> None:
        """Builds the library, or writes down why not."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        failure = target.parent / FAILURE
        failure.unlink(missing_ok=True)
        flags = X86_64 if platform.machine().lower() in ("x86_64", "amd64") else {}
        try:
            if sys.platform != "linux":
                raise OSError(f"it is for Linux, and this is {sys.platform}")
            left_out = [stem for stem, options in flags.items() if not self.takes(options)]
            for stem in left_out:
                self.warn(
                    f"the compiler does not know {' '.join(flags[stem])}; {stem} is left out of the native kernel"
                )
            objects = []
            for source in ext.sources:
                stem = Path(source).stem
                if stem in left_out:
                    continue
                objects += self.compiler.compile(
                    [source],
                    output_dir=self.build_temp,
                    extra_postargs=[*COMMON, *flags.get(stem, [])],
                    macros=[(f"MXFP4_WITHOUT_{name.upper()}", "1") for name in left_out],
                    depends=ext.depends,
                )
            self.compiler.link_shared_object(objects, str(target), extra_postargs=["-pthread"], target_lang="c++")
        except (OSError, CCompilerError, CompileError, LinkError, PlatformError) as error:
            target.unlink(missing_ok=True)
            failure.write_text(f"it could not be built: {error}\n", encoding="utf-8")
            self.warn(f"the native kernel is left out: {failure.read_text(encoding='utf-8').strip()}")

    def takes(self, options: list[str]) -> bool:
        """Whether the compiler is new enough for an instruction set."""
        probe = Path(self.build_temp, "probe.cpp")
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text("int main() {}\n", encoding="utf-8")
        try:
            for built in self.compiler.compile([str(probe)], output_dir=self.build_temp, extra_postargs=options):
                Path(built).unlink()
        except (CCompilerError, CompileError):
            return False
        return True

    def copy_extensions_to_source(self) -> None:
        """As for any extension, in an editable install; where there is no library, the reason."""
        for ext in self.extensions:
            wanted = Path(self.get_ext_fullpath(ext.name))
            for name in (wanted.name, FAILURE):
                built = Path(self.build_lib, *ext.name.split(".")[:-1], name)
                (wanted.parent / name).unlink(missing_ok=True)
                if built.exists():
                    shutil.copy(built, wanted.parent / name)


class PlatformWheel(bdist_wheel):
    """A wheel for the platform, but for every Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tag."""
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[
        Extension(
            "hf_mxfp4.backends._native",
            sources=sorted(str(path) for path in NATIVE.glob("*.cpp")),
            depends=sorted(str(path) for path in [*NATIVE.glob("*.inc"), *NATIVE.glob("*.h")]),
            language="c++",
            py_limited_api=True,
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
