"""Builds the kernels of whale_torch: csrc/ -> whale_torch/_C_cpu.so and, where nvcc is, whale_torch/_C_cuda.so.

Torch is not imported, only its headers and libraries are used, so that this runs under build isolation. Without them or
without a C++ compiler the wheel is pure Python, and says so. Switches, all for build time:

WHALE_BUILD_EXT=auto|0|1       auto: build where it can be; 0: pure Python; 1: what is missing is an error
WHALE_TORCH_CUDA=auto|0|1      auto: the CUDA library where nvcc is, a failing nvcc only warns; 1: both are errors
WHALE_TORCH_CUDA_ARCHS=80;90   compiled for each, and as PTX for the newest
CXX, CUDA_HOME, MAX_JOBS       as usual
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

CSRC = Path("csrc")
X86_64 = platform.machine() in ("x86_64", "AMD64")
# The oldest torch whose libtorch the libraries load into.
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"
COMMON_FLAGS = ["-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", STABLE_ABI]
# NaN and inf must survive, so -ffast-math is out; these two let loops vectorise.
LOOP_FLAGS = ["-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
ISA_FLAGS = {
    "baseline": [],
    "v3": ["-march=x86-64-v3"],
    "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
}


def say(text: str) -> None:
    print(f"whale_torch build: {text}", file=sys.stderr, flush=True)


def switch(name: str) -> str:
    value = os.environ.get(name, "auto")
    if value not in ("auto", "0", "1"):
        raise SystemExit(f"{name} is {value!r}; it takes auto, 0 or 1")
    return value


def torch_root() -> Path | None:
    """The installed torch: of this interpreter, else of the environment that an isolated build is run from."""
    spec = importlib.util.find_spec("torch")
    found = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    found += [Path(sysconfig.get_path(kind)) / "torch" for kind in ("purelib", "platlib")]
    if "VIRTUAL_ENV" in os.environ:
        found += Path(os.environ["VIRTUAL_ENV"]).glob("lib/python*/site-packages/torch")
    return next((root for root in found if (root / "include/torch/csrc/stable/library.h").exists()), None)


def compiler() -> str | None:
    wanted = [os.environ["CXX"].split()[0]] if "CXX" in os.environ else ["g++", "clang++", "c++"]
    return next((path for name in wanted if (path := shutil.which(name))), None)


def nvcc() -> Path | None:
    if "CUDA_HOME" in os.environ:
        places = [Path(os.environ["CUDA_HOME"]) / "bin/nvcc"]
    else:
        on_path = shutil.which("nvcc")
        places = [Path("/usr/local/cuda/bin/nvcc"), *sorted(Path("/usr/local").glob("cuda-*/bin/nvcc"), reverse=True)]
        places += [Path(on_path)] if on_path else []
    return next((path.resolve() for path in places if path.exists()), None)


def missing() -> str | None:
    """Why the CPU library cannot be built here; None if it can."""
    if switch("WHALE_BUILD_EXT") == "0":
        return "WHALE_BUILD_EXT=0"
    if not sys.platform.startswith("linux"):
        return f"the kernels build on Linux, this is {sys.platform}"
    if torch_root() is None:
        return "no torch >= 2.11 with headers in this environment"
    if compiler() is None:
        return "no C++ compiler"
    return None


def extensions() -> list[Extension]:
    reason = missing()
    if reason is not None:
        if switch("WHALE_BUILD_EXT") == "1":
            raise SystemExit(f"WHALE_BUILD_EXT=1, but {reason}")
        say(f"pure Python, without compiled kernels: {reason}")
        return []
    found = [Extension("whale_torch._C_cpu", sources=[])]
    wanted = switch("WHALE_TORCH_CUDA")
    if wanted == "0":
        say("no CUDA library: WHALE_TORCH_CUDA=0")
    elif nvcc() is not None:
        found.append(Extension("whale_torch._C_cuda", sources=[], optional=wanted == "auto"))
    elif wanted == "1":
        raise SystemExit("WHALE_TORCH_CUDA=1, but no nvcc: set CUDA_HOME")
    else:
        say("no CUDA library: no nvcc")
    return found


class Build(build_ext):
    """Calls the compilers directly: plain shared libraries that need libtorch and no Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        if ext.name.endswith("_C_cpu"):
            self.build_cpu(target)
            return
        try:
            self.build_cuda(target)
        except CompileError:
            if not ext.optional:
                raise
            say("no CUDA library: nvcc failed, see above (WHALE_TORCH_CUDA=1 makes this an error)")

    def copy_extensions_to_source(self) -> None:
        self.extensions = [
            ext for ext in self.extensions if Path(self.build_lib, self.get_ext_filename(ext.name)).exists()
        ]
        super().copy_extensions_to_source()

    def build_cpu(self, target: Path) -> None:
        jobs: list[tuple[Path, str, list[str]]] = []
        for source in sorted((CSRC / "cpu").glob("*.cpp")):
            if source.stem.endswith("_loops"):
                for isa in ISA_FLAGS if X86_64 else ["baseline"]:
                    jobs.append((source, isa, [*LOOP_FLAGS, *ISA_FLAGS[isa], f"-DWHALE_ISA={isa}"]))
            else:
                jobs.append((source, "", self.torch_includes()))
        cxx = os.environ.get("CXX", compiler() or "").split()
        machine = ["-DWHALE_X86_64"] if X86_64 else []
        objects = self.compile_all(
            [([*cxx, *COMMON_FLAGS, *machine, *flags, "-c", str(source)], source, tag) for source, tag, flags in jobs]
        )
        self.link(cxx, objects, target, [])
        say(f"{target.name}: {', '.join(ISA_FLAGS) if X86_64 else 'baseline'}, headers of {torch_root()}")

    def build_cuda(self, target: Path) -> None:
        tool = nvcc()
        assert tool is not None
        archs = os.environ.get("WHALE_TORCH_CUDA_ARCHS", "80;90").replace(",", ";").split(";")
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        codes.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
        host = ["-Xcompiler", "-fPIC,-fvisibility=hidden", "-ccbin", str(compiler())]
        flags = ["-O3", "-std=c++20", "-Xptxas=--warn-on-spills", STABLE_ABI, *codes, *host]
        flags += self.torch_includes()
        sources = sorted((CSRC / "cuda").glob("*.cu"))
        objects = self.compile_all([([str(tool), *flags, "-c", str(source)], source, "") for source in sources])
        libraries = next((path for path in (tool.parents[1] / "lib64", tool.parents[1] / "lib") if path.is_dir()), None)
        extra = [f"-L{libraries}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        self.link([str(compiler())], objects, target, extra)
        say(f"{target.name}: sm_{', sm_'.join(archs)} and PTX of compute_{archs[-1]}, by {tool}")

    def torch_includes(self) -> list[str]:
        return ["-isystem", str(torch_root() / "include")]  # type: ignore[operator]

    def compile_all(self, jobs: list[tuple[list[str], Path, str]]) -> list[str]:
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)

        def compile_one(job: tuple[list[str], Path, str]) -> str:
            command, source, tag = job
            stem = f"{source.parent.name}_{source.stem}{'_' + tag if tag else ''}"
            output, record = str(folder / f"{stem}.o"), folder / f"{stem}.txt"
            inputs = [source, *CSRC.glob("**/*.h")]
            newest = str(max(path.stat().st_mtime_ns for path in inputs))
            # An object is kept if the same command made it from the same files.
            state = "\n".join([newest, *command])
            if Path(output).exists() and record.exists() and record.read_text() == state:
                return output
            record.unlink(missing_ok=True)
            done = subprocess.run([*command, "-o", output], capture_output=True, text=True, check=False)
            if done.stdout or done.stderr:
                print(f"{source} {tag}\n{done.stdout}{done.stderr}".rstrip(), file=sys.stderr, flush=True)
            if done.returncode:
                raise CompileError(f"{source} does not compile, see above: {' '.join(command)}")
            record.write_text(state)
            return output

        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            return list(pool.map(compile_one, jobs))

    def link(self, cxx: list[str], objects: list[str], target: Path, extra: list[str]) -> None:
        libtorch = [f"-L{torch_root()}/lib", "-ltorch_cpu"]  # type: ignore[str-bytes-safe]
        command = [*cxx, "-shared", "-o", str(target), *objects, *libtorch, *extra]
        if subprocess.run(command, check=False).returncode:
            raise CompileError(f"{target.name} does not link, see above: {' '.join(command)}")


class Wheel(bdist_wheel):
    """py3-none-<platform>: the libraries use no Python headers, so one wheel serves every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


setup(ext_modules=extensions(), cmdclass={"build_ext": Build, "bdist_wheel": Wheel})
