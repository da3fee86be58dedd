"""Builds the sdist and from it the wheel, and runs a part of the tests on the wheel with given versions of its needs.

    python scripts/test_packages.py                                  # builds both and looks into them
    python scripts/test_packages.py --part kernels --torch 2.10.0 --triton 3.6.0 --python python3.12
    python scripts/test_packages.py --part bare      # the wheel without extras: every command and README's examples
    python scripts/test_packages.py --part engine --folder FOLDER -- -k speculat

The sdist must hold the repository, the wheel the library alone with its entry points. Tests are those of the unpacked
sdist; the library that they import is the wheel, in a new environment of ``--python`` with ``--torch`` and
``--triton``, and with the newest versions of everything that is not given.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("deepseek_attn", "kernels", "models", "configs")  # contents of the wheel
PARTS = {
    "kernels": ["tests/kernels", "tests/flash_mla_api", "tests/impls"],
    "caches": ["tests/cache", "tests/attention", "tests/layers", "tests/checkpoint", "tests/plugins"],
    "models": ["tests/models", "tests/runner", "tests/v32", "tests/testing"],
    "engine": ["tests/engine", "tests/text", "tests/cli", "tests/config", "tests/utils"],
    "bare": ["tests/bare"],
    "laboratory": ["tests/lab", "tests/estimates"],
}
BUILD = "from setuptools import build_meta; print(build_meta.build_{}('{}'))"


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command, which is shown before it starts; ends the script with it if it fails."""
    print("+", *command, file=sys.stderr, flush=True)
    result = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        sys.exit(f"{result.stdout}failed: {' '.join(map(str, command))}")
    return result.stdout


def environment(python: str, folder: Path) -> Path:
    """The interpreter of a new environment that can build packages."""
    if python == sys.executable:
        venv.create(folder, with_pip=True)
    else:
        run(python, "-m", "venv", folder, cwd=ROOT)
    interpreter = folder / "bin" / "python"
    run(interpreter, "-m", "pip", "install", "--quiet", "setuptools>=77", cwd=folder)
    return interpreter


def repository() -> list[str]:
    """Files that git knows or would add; of an unpacked sdist, which has no git, all but its metadata."""
    if (ROOT / ".git").exists():
        listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
        return [name for name in listed if (ROOT / name).is_file()]
    made = re.compile(r"PKG-INFO|setup\.cfg|(.*/)?(__pycache__|\.\w+_cache|\.venv|build|[\w.-]+\.egg-info)/.*")
    names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
    return [name for name in names if not made.fullmatch(name)]


def build_sdist(python: Path, folder: Path) -> Path:
    """The folder of the unpacked sdist, built from a copy of the repository."""
    files = repository()
    for name in files:
        place = folder / "repository" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, place)
    built = run(python, "-c", BUILD.format("sdist", folder), cwd=folder / "repository").split()[-1]
    with tarfile.open(folder / built) as archive:
        archive.extractall(folder, filter="data")
    sdist = folder / built.removesuffix(".tar.gz")
    if missing := [name for name in files if not (sdist / name).exists()]:
        sys.exit(f"{built} lacks {', '.join(missing)}: MANIFEST.in names what it holds")
    return sdist


def build_wheel(python: Path, sdist: Path) -> Path:
    """The wheel that is built from the unpacked sdist."""
    wheel = sdist.parent / run(python, "-c", BUILD.format("wheel", sdist.parent), cwd=sdist).split()[-1]
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [metadata] = [name for name in names if name.endswith(".dist-info/entry_points.txt")]
        entry_points = archive.read(metadata).decode()
    places = {"deepseek_attn": "deepseek_attn"} | {name: f"deepseek_attn/{name}" for name in SOURCES[1:]}
    wanted = {
        str(Path(place) / path.relative_to(sdist / name))
        for name, place in places.items()
        for path in (sdist / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    if missing := sorted(wanted - names):
        sys.exit(f"{wheel.name} lacks {', '.join(missing)}: pyproject.toml lists packages and data")
    if more := sorted(name for name in names - wanted if ".dist-info/" not in name):
        sys.exit(f"{wheel.name} holds {', '.join(more)}, which are not part of the library")
    for group in ("console_scripts", "vllm.general_plugins", "sglang.srt.plugins"):
        if f"[{group}]" not in entry_points:
            sys.exit(f"{wheel.name} has no entry points {group}")
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
    return wheel


def install(python: Path, wheel: Path, part: str, versions: list[str]) -> None:
    """Installs the wheel and its tests' packages; the given versions stay."""
    if part == "bare":
        run(python, "-m", "pip", "install", "--quiet", "--no-compile", wheel, "pytest>=8", *versions, cwd=wheel.parent)
        print(run(python, "-m", "pip", "list", "--format", "freeze", cwd=wheel.parent), flush=True)
        return
    # the oldest supported transformers may require a newer torch than a floor: pip reports it
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[test]", *versions, cwd=wheel.parent)
    code = "import torch, triton, sys; print('python', sys.version.split()[0], torch.__version__, triton.__version__)"
    print(run(python, "-c", code, cwd=wheel.parent).strip(), flush=True)


def test(python: Path, sdist: Path, part: str, options: list[str]) -> int:
    """Runs a part of the sdist's tests on the installed wheel; pytest's exit status."""
    for name in SOURCES[:3]:  # or else they would be imported
        shutil.move(sdist / name, sdist.parent / f"{sdist.name}-{name}")
    marks = ["-m", ""] if part == "bare" else []
    return subprocess.call([python, "-m", "pytest", *marks, *PARTS[part], *options], cwd=sdist)


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    parser.add_argument("--torch", help="its version, e.g. 2.10.0")
    parser.add_argument("--triton", help="its version, e.g. 3.6.0")
    parser.add_argument("--part", choices=PARTS, help="tests to run; none without it")
    parser.add_argument("--folder", type=Path, help="keeps packages and environment in this new folder")
    parser.add_argument("options", nargs="*", help="of pytest, after --")
    args = parser.parse_args()
    if args.folder is not None and args.folder.exists():
        parser.error(f"--folder {args.folder} exists already")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder.resolve() if args.folder else Path(temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        python = environment(args.python, folder / "environment")
        sdist = build_sdist(python, folder)
        wheel = build_wheel(python, sdist)
        if args.part is None:
            return 0
        pins = {"torch": args.torch, "triton": args.triton}
        install(python, wheel, args.part, [f"{name}=={version}" for name, version in pins.items() if version])
        return test(python, sdist, args.part, args.options)


if __name__ == "__main__":
    sys.exit(main())
