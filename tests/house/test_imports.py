"""Which way imports go, and that the library needs neither a GPU nor the packages that are optional."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"deepseek_attn": "deepseek_attn", "kernels": "deepseek_attn.kernels", "models": "deepseek_attn.models"}
FOLDERS = ("benchmarks", "configs", "deepseek_attn", "docs", "examples", "kernels", "models", "scripts", "tests")
TEXT = {".py", ".md", ".toml", ".json", ".cfg", ".yml", ".yaml", ".txt", ".sh", ""}
# Upper layers, top first. Nothing below imports them; the package itself only names them (lazily).
UPPER = (
    "__main__",
    "bench",
    "bench_model",
    "cli",
    "drafting",
    "engine",
    "experiments",
    "planner",
    "runner",
    "scoring",
    "sequence",
    "training",
    "models",
)


def module_files():
    for folder, package in PACKAGES.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join((package, *(p for p in parts if p != "__init__"))), file


MODULES = dict(module_files())


def imported(module):
    """Every module that a file imports anywhere: at the top, in functions, for type checking."""
    file = MODULES[module]
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield name
            # `from deepseek_attn import runner` names a module too
            yield from (f"{name}.{alias.name}" for alias in node.names if f"{name}.{alias.name}" in MODULES)


def inside(module, *parts):
    return any(module == f"deepseek_attn.{p}" or module.startswith(f"deepseek_attn.{p}.") for p in parts)


def violations(modules, forbidden):
    return [f"{m} imports {name}" for m in modules for name in imported(m) if forbidden(name)]


def test_the_files_are_found():
    assert {"deepseek_attn", "deepseek_attn.cache.manager", "deepseek_attn.kernels", "deepseek_attn.models.moe"} <= set(
        MODULES
    )
    assert "deepseek_attn.kernels.common.quant" in set(imported("deepseek_attn.cache.records"))
    assert "deepseek_attn.models.deepseek_v4" in set(imported("deepseek_attn.runner.model_runner"))


def test_kernels_import_nothing_above_kernels():
    kernels = [m for m in MODULES if inside(m, "kernels")]
    bad = violations(kernels, lambda name: name.split(".")[0] == "deepseek_attn" and not inside(name, "kernels"))
    assert not bad


def test_the_core_imports_nothing_above_it():
    core = [m for m in MODULES if m != "deepseek_attn" and not inside(m, "kernels", *UPPER)]
    assert len(core) > 20
    assert not violations(core, lambda name: inside(name, *UPPER))


@pytest.mark.parametrize(
    ("layer", "above"),
    [
        ("models", ("runner", "planner", "bench", "engine", "training", "cli")),
        ("runner", ("planner", "bench", "engine", "training", "cli")),
        ("training", ("planner", "bench", "engine", "experiments", "cli")),
        ("planner", ("bench", "engine", "cli")),
        ("bench", ("engine", "cli")),
        ("engine", ("cli",)),
        ("experiments", ("cli",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_upper_layers_import_downwards(layer, above):
    modules = [m for m in MODULES if inside(m, layer)]
    assert modules
    assert not violations(modules, lambda name: inside(name, *above))


@pytest.mark.parametrize("package", ["kernels", "models"])
def test_package_files_hold_a_docstring_only(package):
    """transformers imports any package called ``kernels`` that it finds: importing ours must do nothing."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


def test_library_code_never_imports_tests_or_scripts():
    assert not violations(MODULES, lambda name: name.split(".")[0] in ("tests", "scripts", "conftest"))


def test_no_conftest_in_the_root():
    """It would put the root, with its folders ``kernels`` and ``models``, on ``sys.path``."""
    assert not (ROOT / "conftest.py").exists()


def test_no_file_names_paths_of_a_machine():
    places = "|".join(["work", "tmp", "home", "root", "mnt"])
    pattern = re.compile(rf"(?<![\w.~*-])/({places})/")
    files = [f for f in ROOT.iterdir() if f.is_file() and f.name != ".git"]  # a worktree's names its repository
    files += [f for folder in FOLDERS for f in (ROOT / folder).rglob("*") if f.is_file()]
    found = []
    for file in files:
        if file.suffix in TEXT and "__pycache__" not in file.parts:
            for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
                if pattern.search(line):
                    found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found


ALONE = """
import importlib.abc, sys

OPTIONAL = ("triton", "flash_mla", "flashinfer", "transformers")

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OPTIONAL:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocker())
import deepseek_attn
assert "torch" not in sys.modules, "importing the package must be cheap"
import torch
assert not torch.cuda.is_available()
for name in deepseek_attn.__all__:
    getattr(deepseek_attn, name)
from deepseek_attn.impls import describe_impls, get_impl
for name, usable, reason in describe_impls("cpu"):
    print("impl", name, usable, reason)
assert get_impl("auto").supported(torch.device("cpu"))[0]
runner = deepseek_attn.ModelRunner.from_config("tiny", layers=[1], max_model_len=64, max_num_seqs=1)
sequence = runner.sequence([0, 5, 9, 2, 7])
logits = runner.step([(sequence, 5)]).logits[0]
assert logits.shape == (1, 512) and logits.isfinite().all()
for name in OPTIONAL:
    assert name not in sys.modules, name
print("done")
"""


def test_runs_without_a_gpu_and_without_optional_packages(tmp_path):
    """A fresh process in which triton, FlashMLA, FlashInfer and transformers cannot be imported."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.endswith("done\n")
