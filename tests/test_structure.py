"""Who may import whom, where SimPy, vLLM and torch may be named, and what every public name must say."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ("engine", "simulator", "calibration", "tuner", "cli")
"""A package imports those before it; never the other way."""
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".csv", ".html", ".css", ".js", ".sh", ""}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


MODULES = [pytest.param(p, f, id=f"{p}/{f.name}") for p in ORDER for f in sources(p)]


def imports(node: ast.AST) -> Iterator[str]:
    """Dotted names of what `node` and all below it import; a relative import starts with its dots."""
    for found in ast.walk(node):
        if isinstance(found, ast.Import):
            yield from (alias.name for alias in found.names)
        elif isinstance(found, ast.ImportFrom):
            base = "." * found.level + (found.module or "")
            yield base
            yield from (f"{base}.{alias.name}" for alias in found.names)


def at_module_level(tree: ast.Module) -> Iterator[str]:
    """Imports that run when the module is imported: those outside functions."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imports(node)
        todo += ast.iter_child_nodes(node)


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def test_there_are_sources_to_check():
    assert all(len(sources(p)) > 3 for p in ORDER)


@pytest.mark.parametrize(("package", "file"), MODULES)
def test_a_package_imports_only_those_before_it(package, file):
    allowed = {"__version__", *ORDER[: ORDER.index(package) + 1]}
    for name in imports(parsed(file)):
        assert not name.startswith("."), f"{file.name}: relative import of {name}; write rackplan.{package}…"
        assert name.partition(".")[0] not in ORDER, f"{file.name}: {name} is not the installed name"
        if name.startswith("rackplan."):
            assert name.split(".")[1] in allowed, f"{package}/{file.name} must not import {name}"


@pytest.mark.parametrize(("package", "file"), MODULES)
def test_only_the_simulator_knows_simpy(package, file):
    found = {n.partition(".")[0] for n in imports(parsed(file))}
    assert package == "simulator" or "simpy" not in found


PLUGIN = ROOT / "engine" / "vllm_plugin"
SUBCLASSES = {f for f in PLUGIN.glob("*.py") if f.name == "scheduler.py" or f.name.startswith("cpu_")}
"""Modules of classes derived from vLLM's: vLLM imports them, nothing of rackplan's own may."""


@pytest.mark.parametrize(("package", "file"), MODULES)
def test_vllm_and_torch_are_imported_inside_functions_alone(package, file):
    assert file in SUBCLASSES or not {n.partition(".")[0] for n in at_module_level(parsed(file))} & {"vllm", "torch"}


@pytest.mark.parametrize(("package", "file"), MODULES)
def test_what_derives_from_vllm_is_imported_by_the_plugin_alone(package, file):
    derived = {f"rackplan.engine.vllm_plugin.{f.stem}" for f in SUBCLASSES}
    assert PLUGIN in file.parents or not derived & set(imports(parsed(file)))


def test_the_scheduler_is_one_file_that_needs_vllm_and_the_standard_library_alone():
    roots = {n.partition(".")[0] for n in imports(parsed(PLUGIN / "scheduler.py"))}
    assert roots <= {"vllm", *sys.stdlib_module_names}


def members(file: Path) -> Iterator[tuple[str, ast.AST, bool]]:
    """(qualified name, node, is it a method) of a module's public functions, classes, and methods that are not
    properties; a property's name is its statement."""
    for node in parsed(file).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name, node, False
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_") and not is_property(inner):
                        yield f"{node.name}.{inner.name}", inner, True


def is_property(node: ast.FunctionDef) -> bool:
    return any("property" in ast.unparse(d) for d in node.decorator_list)


def is_documented(node: ast.AST) -> bool:
    assert isinstance(node, (ast.FunctionDef, ast.ClassDef))
    return bool(ast.get_docstring(node))


INTERFACE = {
    name.partition(".")[2]
    for package in ORDER
    for file in sources(package)
    for name, node, is_method in members(file)
    if is_method and is_documented(node)
}
"""Names of methods that some class documents; what implements them need not say it again."""


@pytest.mark.parametrize(("package", "file"), MODULES)
def test_every_public_name_has_a_docstring(package, file):
    assert ast.get_docstring(parsed(file)), f"{package}/{file.name} does not say what it holds"
    silent = [
        name
        for name, node, is_method in members(file)
        if not is_documented(node) and not (is_method and name.partition(".")[2] in INTERFACE)
    ]
    assert not silent, f"{package}/{file.name}: without docstring: {', '.join(silent)}"


@pytest.mark.parametrize("package", ORDER)
def test_a_package_says_what_it_holds_where_to_start_and_what_it_may_import(package):
    text = ast.get_docstring(parsed(ROOT / package / "__init__.py")) or ""
    assert "Start with" in text
    assert "mport" in text


def project_files() -> list[Path]:
    folders = [*ORDER, "rackplan", "tests", "bench", "docs", ".ci"]
    found = [f for d in folders if (ROOT / d).is_dir() for f in (ROOT / d).rglob("*") if f.is_file()]
    found += [f for f in ROOT.iterdir() if f.is_file() and f.suffix in (".md", ".toml") or f.name == "Makefile"]
    return [f for f in found if f.suffix in TEXT and "__pycache__" not in f.parts and f != Path(__file__).resolve()]


def test_no_file_names_a_place_outside_the_project():
    """Paths of the machine that it was written on would lead nowhere on another."""
    places = ("/work/", "/home/", "/root/", "/tmp/brief", "../shared/")
    # Tests may look for recorded traces beside the checkout, and skip where there are none.
    excused = {("tests", "../shared/")}
    wrong = [
        f"{file.relative_to(ROOT)}: {place}"
        for file in project_files()
        for text in [file.read_text(encoding="utf-8", errors="replace")]
        for place in places
        if place in text and (file.relative_to(ROOT).parts[0], place) not in excused
    ]
    assert not wrong
