"""Which way imports go, file by file, and that the library needs neither a GPU nor the packages that are optional."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import deepseek_attn
from tests.house.sources import ROOT, nodes, text, tree
from tests.support.typed import required

PACKAGES = {"deepseek_attn": "deepseek_attn", "kernels": "deepseek_attn.kernels", "models": "deepseek_attn.models"}

# Rooms by floor, from the ground up. A file imports from its own room, from rooms of floors below, and from rooms that
# stand further left on its own floor; nothing else, not even inside a function or for a type checker.
FLOORS = (
    ("utils", "config", "text", "data", "kernels.common", "kernels.indices"),
    ("cache",),
    (
        "kernels.attention",
        "kernels.collectives",
        "kernels.linear",
        "kernels.latent",
        "kernels.hyper_connection",
        "kernels.engram",
        "kernels.norm",
        "kernels.sampling",
    ),
    ("layers", "kernels.insert", "kernels.moe", "impls", "flash_mla_api", "plugins"),
    ("checkpoint",),
    ("kernels.indexer",),
    ("attention",),
    ("v32", "v41"),
    ("models",),
    ("runner",),
    ("engine", "estimates", "testing"),
    ("cli",),
    ("lab.inspect", "lab.training", "lab.bench", "lab.lm_eval"),
    ("lab.experiments",),
    ("lab.commands",),
)
ROOMS = [room for floor in FLOORS for room in floor]
EXAMPLE = "deepseek_attn.testing.__main__"  # of README: imports the public names as a script does
LABORATORY = "deepseek_attn.lab"
# modules beside the rooms: the lazy public names, `python -m deepseek_attn`, public names of the laboratory
OUTSIDE = ("__init__", "__main__", "inspect", "training")

Graph = dict[str, set[str]]


def module_files() -> Iterator[tuple[str, Path]]:
    for folder, package in PACKAGES.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join((package, *(part for part in parts if part != "__init__"))), file


MODULES = dict(module_files())


def imported(nodes: Iterable[ast.AST], package: list[str], modules: Iterable[str]) -> Iterator[str]:
    """Every name that a file imports anywhere: at the top, in functions, for type checking.

    Args:
        nodes: all nodes of the file.
        package: parts of the package that relative imports start from.
        modules: names that are modules, for ``from package import module``.
    """
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{name}.{alias.name}"
                yield full if full in modules else name


def syntax(module: str) -> ast.Module:
    return tree(MODULES[module])


def nodes_of(module: str) -> tuple[ast.AST, ...]:
    return nodes(MODULES[module])


def package_of(module: str) -> list[str]:
    parts = module.split(".")
    return parts if MODULES[module].name == "__init__.py" else parts[:-1]


@cache
def imports() -> Graph:
    """Names that each module imports."""
    return {module: set(imported(nodes_of(module), package_of(module), MODULES)) for module in MODULES}


@cache
def import_graph() -> Graph:
    """Modules of the library that each module imports."""
    return {module: {name for name in names if name in MODULES} - {module} for module, names in imports().items()}


def room(module: str) -> str:
    """``cache`` of ``deepseek_attn.cache.manager``; families of kernels and folders of the laboratory are rooms."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2] if parts[:1] in (["kernels"], ["lab"]) else parts[:1]) or "__init__"


def folder(module: str) -> str:
    """The package that a file lies in; a package's own ``__init__`` lies in it too."""
    return ".".join(package_of(module))


def upward(graph: Graph, order: list[str]) -> set[tuple[str, str]]:
    """Imports of a room by a file of a room before it in ``order``, or of a room that is not in ``order``."""
    rank = {name: index for index, name in enumerate(order)}
    return {
        (module, name)
        for module, names in graph.items()
        if room(module) in rank
        for name in names
        if rank.get(room(name), len(rank)) > rank[room(module)]
    }


def circles(graph: Graph) -> list[set[str]]:
    """Sets of nodes that reach each other: the strongly connected components of more than one node."""
    reach = {node: reachable(graph, node) for node in graph}
    found: list[set[str]] = []
    for node in graph:
        if not any(node in circle for circle in found):
            circle = {other for other in reach[node] if node in reach.get(other, ())} | {node}
            found += [circle] if len(circle) > 1 else []
    return found


def reachable(graph: Graph, start: str) -> set[str]:
    found, left = set(), [start]
    while left:
        new = graph.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def grouped(graph: Graph, group: Callable[[str], str]) -> Graph:
    """The same imports between groups of files, without those inside one."""
    found: Graph = {group(module): set() for module in graph}
    for module, names in graph.items():
        found[group(module)] |= {group(name) for name in names} - {group(module)}
    return found


def test_the_files_are_found():
    assert {"deepseek_attn", "deepseek_attn.cache.manager", "deepseek_attn.kernels", "deepseek_attn.models.moe"} <= set(
        MODULES
    )
    assert "deepseek_attn.kernels.common.quant" in import_graph()["deepseek_attn.cache.records"]
    assert "deepseek_attn.models.families" in import_graph()["deepseek_attn.runner.build"]
    assert len(import_graph()) > 200


def test_every_room_has_a_floor():
    found = {room(module) for module in MODULES} - {*OUTSIDE, "kernels", "lab"}
    assert found == set(ROOMS), "give each room its place in FLOORS of this file, and in docs/structure.md"
    assert len(ROOMS) == len(set(ROOMS))


def test_nothing_but_rooms():
    """No loose modules in ``deepseek_attn``, ``kernels`` or ``models`` but those that are a room."""
    loose = {path.stem for path in (ROOT / "deepseek_attn").glob("*.py")}
    assert loose == set(OUTSIDE)
    assert [path.name for path in (ROOT / "kernels").glob("*.py")] == ["__init__.py"]


def test_imports_go_down():
    assert upward({module: names for module, names in import_graph().items() if module != EXAMPLE}, ROOMS) == set()
    assert not any(EXAMPLE in names for names in import_graph().values())


def test_nothing_outside_the_laboratory_imports_it():
    """But the public names, which are lazy or modules of their own; commands are found by name."""
    doors = {"deepseek_attn", *(f"deepseek_attn.{name}" for name in OUTSIDE)}
    inside = {module for module in MODULES if module.split(".")[1:2] == ["lab"]}
    assert len(inside) > 70
    wrong = {
        (module, name)
        for module, names in imports().items()
        for name in names
        if module not in doors | inside and (name in doors - {"deepseek_attn"} or name.startswith(LABORATORY))
    }
    assert wrong == set()


def test_nothing_imports_the_package_itself_or_scripts():
    """Public names are for others: inside the library they would be circles; a script or a test is no part of it."""
    wrong = [
        (module, name)
        for module, names in imports().items()
        for name in names
        if name.split(".")[0] in ("tests", "scripts", "conftest")
        or (name in ("deepseek_attn", "deepseek_attn.__main__") and module != EXAMPLE)
    ]
    assert not wrong


def test_type_checkers_find_the_public_names():
    """They do not follow the lazy look-up, so the same imports stand beside it."""
    [block] = [node for node in syntax("deepseek_attn").body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert len(imports) == len(block.body)
    found = {alias.name: node.module for node in imports for alias in node.names}
    assert found == deepseek_attn._HOMES
    assert {*found, "__version__"} == set(deepseek_attn.__all__)


def test_only_commands_print():
    """The library logs to ``deepseek_attn``, or raises; commands print by `terminal`, which escapes controls."""
    printing = [
        module
        for module in MODULES
        if room(module) != "__init__"  # whose docstring shows an example
        and module != "deepseek_attn.cli.terminal"
        and not module.endswith(".__main__")
        if re.search(r"(?<![\w.])(print|tqdm\.write)\(", text(MODULES[module]))
    ]
    assert not printing


def test_progress_bars_are_those_of_notebooks_too():
    """`tqdm.auto` draws a widget in a notebook and a line of text elsewhere."""
    assert any("tqdm.auto" in names for names in imports().values())
    assert not [module for module, names in imports().items() if "tqdm" in names]


def test_no_op_has_the_name_of_a_file_beside_it():
    """Importing the file would put the module in the place of the family's function."""
    families = [module for module in MODULES if re.fullmatch(r"deepseek_attn\.kernels\.\w+", module)]
    ops = {
        f"{family}.{node.name}"
        for family in families
        if package_of(family) == family.split(".")
        for node in syntax(family).body
        if isinstance(node, ast.FunctionDef)
    }
    assert "deepseek_attn.kernels.linear.multi_linear" in ops
    assert not ops & set(MODULES)


def test_no_circle_of_files():
    assert circles(import_graph()) == []


def test_no_circle_of_rooms_or_folders():
    assert circles(grouped(import_graph(), room)) == []
    assert circles(grouped(import_graph(), folder)) == []


# the checks themselves

TOY: Graph = {
    "deepseek_attn.cache.pool": {"deepseek_attn.config.model", "deepseek_attn.cache.record"},
    "deepseek_attn.cache.record": set(),
    "deepseek_attn.config.model": set(),
    "deepseek_attn.kernels.linear.tiles": {"deepseek_attn.cache.record"},
}
TOY_ORDER = ["config", "cache", "kernels.linear"]


def toy(**more: str) -> Graph:
    """`TOY` with one more import: ``toy(config_model="deepseek_attn.cache.pool")``."""
    edges = {f"deepseek_attn.{module.replace('_', '.')}": name for module, name in more.items()}
    return {module: names | {edges[module]} if module in edges else names for module, names in TOY.items()}


def test_an_import_of_a_room_above_is_found():
    assert upward(TOY, TOY_ORDER) == set()
    assert upward(toy(config_model="deepseek_attn.cache.pool"), TOY_ORDER) == {
        ("deepseek_attn.config.model", "deepseek_attn.cache.pool")
    }
    assert upward(toy(cache_record="deepseek_attn.kernels.linear.tiles"), TOY_ORDER)
    assert upward(toy(cache_record="deepseek_attn.attic.chest"), TOY_ORDER), "a room without a floor"
    assert len(upward(TOY, TOY_ORDER[::-1])) == 2


def test_a_circle_is_found():
    assert circles(TOY) == []
    assert circles(toy(cache_record="deepseek_attn.cache.pool")) == [
        {"deepseek_attn.cache.pool", "deepseek_attn.cache.record"}
    ]
    longer = toy(cache_record="deepseek_attn.kernels.linear.tiles")
    assert circles(longer) == [{"deepseek_attn.cache.record", "deepseek_attn.kernels.linear.tiles"}]
    # no two files import each other, but two rooms do
    assert circles(toy(config_model="deepseek_attn.cache.record")) == []
    assert circles(grouped(toy(config_model="deepseek_attn.cache.record"), room)) == [{"cache", "config"}]


@pytest.mark.parametrize(
    "source",
    [
        "import deepseek_attn.cache.pool",
        "from deepseek_attn.cache import pool",
        "from deepseek_attn.cache.pool import Pool",
        "from ..cache import pool",
        "from ..cache.pool import Pool as P",
        "def f():\n    from deepseek_attn.cache.pool import Pool",
        "if TYPE_CHECKING:\n    import deepseek_attn.cache.pool",
        "class A:\n    def f(self):\n        if x:\n            from deepseek_attn.cache import pool",
    ],
)
def test_every_spelling_of_an_import_is_seen(source):
    package = ["deepseek_attn", "config"]
    assert list(imported(ast.walk(ast.parse(source)), package, {"deepseek_attn.cache.pool"})) == [
        "deepseek_attn.cache.pool"
    ]


# packages


@pytest.mark.parametrize("package", ["kernels", "models"])
def test_package_files_hold_a_docstring_only(package):
    """transformers imports any package called ``kernels`` that it finds: importing ours must do nothing."""
    source = tree(ROOT / package / "__init__.py")
    assert ast.get_docstring(source)
    assert len(source.body) == 1


def executed(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements that importing a file runs: none of functions, none for type checking."""
    for node in nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from executed(node.orelse)
        elif isinstance(node, ast.stmt | ast.ExceptHandler) and not isinstance(node, ast.FunctionDef):
            yield node
            yield from executed(ast.iter_child_nodes(node))


def imported_with(module: str) -> set[str]:
    """What importing a module imports next: the packages that it lies in, and what its own statements say."""
    found = [node for node in executed(syntax(module).body) if isinstance(node, ast.Import | ast.ImportFrom)]
    parts = module.split(".")
    parents = {".".join(parts[:n]) for n in range(1, len(parts))}
    return parents | set(imported(found, package_of(module), MODULES))


@cache
def imported_at_once() -> dict[str, set[str]]:
    """`imported_with` of every module."""
    return {module: imported_with(module) for module in MODULES}


@pytest.mark.parametrize("family", [name for name in ROOMS if name.startswith("kernels.")])
def test_a_family_of_kernels_needs_no_triton(family):
    """Its contracts can be read, imported and called on a machine that has torch alone."""
    names = reachable(imported_at_once(), f"deepseek_attn.{family}")
    assert "triton" not in {name.split(".")[0] for name in names}


NEEDS_MORE = {  # by what they are for
    "deepseek_attn.lab.lm_eval.model": "lm_eval",
    "deepseek_attn.runner.ahead.prepared": "triton",
    "deepseek_attn.runner.ahead.recording": "triton",
    "deepseek_attn.cli.plan_table": "triton",
    "deepseek_attn.runner.kernel_list": "triton",
    "deepseek_attn.runner.step_plans": "triton",
    "deepseek_attn.testing.fixtures": "pytest",
    "deepseek_attn.testing.layer_suite": "pytest",
    "deepseek_attn.testing.plugin": "pytest",
    "deepseek_attn.testing.transformers_layer": "transformers",
    "deepseek_attn.testing.__main__": "transformers",
}


def test_modules_need_what_the_wheel_installs_alone():
    """Outside the kernels, everything can be imported without extras; what needs more is imported where it is used."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = {required(re.match(r"[\w-]+", line))[0].replace("-", "_") for line in project["dependencies"]}
    installed |= {"deepseek_attn", "markupsafe", *sys.stdlib_module_names}  # markupsafe: jinja2's
    found = {}
    for module in MODULES:
        names = {name.split(".")[0] for name in reachable(imported_at_once(), module)} - installed
        if names and not module.startswith("deepseek_attn.kernels."):
            found[module] = ", ".join(names)
    assert found == NEEDS_MORE


def test_what_importing_a_module_imports_is_seen():
    assert {"torch", "deepseek_attn", "deepseek_attn.kernels"} <= imported_with("deepseek_attn.kernels.sampling")
    assert "triton" in reachable(imported_at_once(), "deepseek_attn.kernels.sampling.launch")


def test_packages_of_the_wheel_are_the_folders():
    """The list in pyproject.toml is explicit: a folder that is missing there is missing in a wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {folder(module) for module in MODULES} | {"deepseek_attn.configs"}
    assert sorted(project["packages"]) == sorted(folders), "list the folders under packages in pyproject.toml"
    assert (ROOT / "deepseek_attn" / "py.typed").exists()
    assert "py.typed" in project["package-data"]["deepseek_attn"]


def test_no_conftest_in_the_root():
    """It would put the root, with its folders ``kernels`` and ``models``, on ``sys.path``."""
    assert not (ROOT / "conftest.py").exists()


ALONE = """
import sys

# to import them fails, and to look for them finds nothing, as torch built for CUDA does for triton
OPTIONAL = ("triton", "flash_mla", "flashinfer", "transformers")
sys.modules |= dict.fromkeys(OPTIONAL)
import deepseek_attn
from deepseek_attn.plugins import sglang, vllm
for plugin in (sglang, vllm):  # as every process of an engine does
    plugin.register()
assert "torch" not in sys.modules, "importing the package must be cheap"
import torch
assert not torch.cuda.is_available()
for name in deepseek_attn.__all__:
    getattr(deepseek_attn, name)
from deepseek_attn.impls import describe_impls, get_impl
for name, _, usable, reason in describe_impls("cpu"):
    print("impl", name, usable, reason)
assert get_impl("auto").supported(torch.device("cpu"))[0]
from deepseek_attn.flash_mla_api import flash_mla_sparse_fwd
q, indices = torch.ones(2, 3, 512).bfloat16(), torch.zeros(2, 1, 1).int()
assert flash_mla_sparse_fwd(q, q[:, :1], indices, 0.1)[0].eq(1).all()
runner = deepseek_attn.ModelRunner.from_config("tiny", layers=[1], max_model_len=64, max_num_seqs=1)
sequence = runner.sequence([0, 5, 9, 2, 7])
logits = runner.step([(sequence, 5)]).rows[0]
assert logits.shape == (1, 512) and logits.isfinite().all()
assert [sys.modules[name] for name in OPTIONAL] == [None] * 4
assert "huggingface_hub" not in sys.modules
print("done")
"""


@pytest.mark.exhaustive
def test_runs_without_a_gpu_and_without_optional_packages(tmp_path):
    """A fresh process in which triton, FlashMLA, FlashInfer and transformers cannot be imported."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=900, env=environment, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.endswith("done\n")


WITHOUT_LABORATORY = """
import contextlib, io, sys

sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
import deepseek_attn
assert "/without-laboratory/" in deepseek_attn.__file__
from deepseek_attn.cli import COMMANDS, LABORATORY, main
runner = deepseek_attn.ModelRunner.from_config("tiny", layers=[1], max_model_len=64, max_num_seqs=1)
assert runner.score([[0, 5, 9]])[0].shape == (3, 512)
for name, command in COMMANDS.items():
    inside, out, err = command.module.startswith(LABORATORY), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        code = main([name, "--help"])
        assert inside and code == 2, name
    if inside:
        assert err.getvalue().startswith(f"deepseek-attn: error: {name} belongs to the laboratory"), err.getvalue()
    else:
        assert f"usage: deepseek-attn {name}" in out.getvalue(), name
    print(name, inside)
assert main(["plan", "--model", "tiny", "--memory", "80GB"]) == 0
print("done")
"""


@pytest.mark.exhaustive
def test_the_core_works_without_the_laboratory(tmp_path):
    """The library in a folder of its own, without ``lab``: models and commands run, and the others are one message."""
    package = tmp_path / "without-laboratory" / "deepseek_attn"
    package.mkdir(parents=True)
    parts = [*(ROOT / "deepseek_attn").iterdir(), *(ROOT / name for name in ("kernels", "models", "configs"))]
    for part in parts:
        if part.name not in ("lab", "__pycache__"):
            (package / part.name).symlink_to(part)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(package.parent)}
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_LABORATORY],
        capture_output=True,
        text=True,
        timeout=900,
        env=environment,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    assert result.stdout.count(" True\n") == 5
    assert result.stdout.endswith("done\n")


def test_a_command_imports_its_own_module_alone():
    """``--help`` of the whole line imports none, and a command imports no other, nor torch."""
    program = (
        "import sys\n"
        "from deepseek_attn.cli import COMMANDS, make_parser\n"
        "words = sys.argv[1:]\n"
        "make_parser(words)\n"
        "assert 'torch' not in sys.modules\n"
        "print(*[name for name, command in COMMANDS.items() if command.module in sys.modules])\n"
    )
    prompt = ["generate", "--prompt", "train"]
    for words, wanted in ((["--help"], ""), (["bench", "op"], "bench"), (["plan"], "plan"), (prompt, "generate")):
        run = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
        assert run.stdout.strip() == wanted


def test_public_names_of_the_laboratory():
    """``deepseek_attn.inspect`` and ``deepseek_attn.training`` are the paths that the pages name."""
    from deepseek_attn import inspect, training
    from deepseek_attn.lab import inspect as own_inspect, training as own_training

    for public, own in ((inspect, own_inspect), (training, own_training)):
        assert public.__all__ == own.__all__
        assert all(getattr(public, name) is getattr(own, name) for name in own.__all__)
