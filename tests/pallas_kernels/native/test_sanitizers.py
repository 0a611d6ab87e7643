"""The C++ kernels under the sanitizers of the system's compiler, and for the narrower vectors that other CPUs have."""

import shutil
import subprocess
from pathlib import Path

import pytest

import pallas_kernels

CHECKS = ("kernels_check.cc", "matmul_check.cc")
KERNELS = Path(pallas_kernels.__file__).parent
BUILDS = {
    "address,undefined": ("-O1", "-march=native", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-O1", "-march=native", "-fsanitize=thread"),
    "128-bit vectors": ("-O2",),
    "256-bit vectors": ("-O2", "-mavx2", "-mfma"),
}


def compile_with(flags: tuple[str, ...], source: Path, output: Path) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [
        compiler,
        "-std=c++17",
        "-g1",
        "-ffp-contract=fast",
        "-pthread",
        *flags,
        f"-I{KERNELS}",
        str(source),
        "-o",
        str(output),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("build", BUILDS)
def test_the_kernels_are_clean(build: str, check: str, tmp_path: Path) -> None:
    trivial = tmp_path / "trivial.cc"
    trivial.write_text("int main() { return 0; }\n")
    tried = compile_with(BUILDS[build], trivial, tmp_path / "trivial")
    if tried.returncode != 0 or subprocess.run([tmp_path / "trivial"], check=False).returncode != 0:
        pytest.skip(f"this machine cannot build or run {build}")
    built = compile_with(BUILDS[build], Path(__file__).with_name(check), tmp_path / "check")
    assert built.returncode == 0, built.stderr[-3000:]
    ran = subprocess.run([tmp_path / "check"], capture_output=True, text=True, check=False, timeout=250)
    assert ran.returncode == 0, ran.stdout[-1500:] + ran.stderr[-3000:]
