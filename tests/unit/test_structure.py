"""The rules of the house, checked over the source itself."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pipelines.schema import GROUPS
from pipelines.signature import load

ROOT = Path(__file__).parents[2]
PACKAGES = ("pipelines", "miles_rl", "sandbox_env")
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 300, 50
GROUP_OF_FOLDER = {"providers": "sandbox", "suites": "suite"}
HEAVY = {"torch", "transformers", "sglang", "megatron", "deepspeed", "daytona"}
CONFIG_GROUPS = {*GROUPS, "pipeline", "experiment", "simulation"}


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports_of(path: Path, *, at_import_time: bool = False) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import; `at_import_time` leaves out those inside functions and for types only."""
    nodes: list[ast.AST] = [tree_of(path)]
    while nodes:
        node = nodes.pop()
        for child in ast.iter_child_nodes(node):
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if at_import_time and (inner or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))):
                continue
            nodes.append(child)
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno}: relative import"
                yield child.lineno, child.module or ""


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def option_files(group: str) -> list[Path]:
    return sorted((ROOT / "conf" / group).glob("*.yaml"))


def test_modules_have_at_most_300_lines_and_functions_at_most_50():
    too_long = []
    for path in sources(*PACKAGES, "benchmarks"):
        lines = len(path.read_text().splitlines())
        if lines > MAX_MODULE_LINES:
            too_long.append(f"{shown(path)}: {lines} lines")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                if size > MAX_FUNCTION_LINES:
                    too_long.append(f"{shown(path)}:{node.lineno}: {node.name} has {size} lines")
    assert not too_long


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("pipelines", {"miles_rl", "sandbox_env", "tests"}),
        ("miles_rl", {"pipelines", "tests"}),
        ("sandbox_env", {"pipelines", "miles_rl", "tests"}),
    ],
)
def test_packages_depend_in_one_direction_only(package: str, forbidden: set[str]):
    wrong = [
        f"{shown(path)}:{line}: {name}"
        for path in sources(package)
        for line, name in imports_of(path)
        if name.split(".")[0] in forbidden
    ]
    assert not wrong


def test_only_the_launcher_knows_ray():
    users = {shown(p) for p in sources(*PACKAGES) for _, name in imports_of(p) if name.split(".")[0] == "ray"}
    assert users == {"pipelines/launch.py"}


def test_the_front_door_imports_nothing_heavy():
    heavy = [
        f"{shown(path)}:{line}: {name}"
        for path in sources("pipelines", "sandbox_env")
        for line, name in imports_of(path, at_import_time=True)
        if name.split(".")[0] in HEAVY
    ]
    assert not heavy


def test_a_folder_with_a_base_is_a_plugin_point_with_a_conf_group():
    folders = [path.parent.name for path in sources(*PACKAGES) if path.name == "base.py"]
    groups = {GROUP_OF_FOLDER.get(name, name) for name in folders}
    assert groups <= CONFIG_GROUPS, "a base.py without a conf group"
    assert {"sandbox", "suite", "engine", "trainer", "loss"} <= groups
    assert [group for group in sorted(groups) if not option_files(group)] == []


def test_conf_has_the_groups_of_the_schema_and_no_others():
    folders = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir() and any(path.glob("*.yaml"))}
    assert folders - {"hydra"} == CONFIG_GROUPS


@pytest.mark.parametrize("group", sorted(CONFIG_GROUPS - {"experiment"}))
def test_every_target_in_conf_can_be_loaded(group: str):
    assert option_files(group)
    for path in option_files(group):
        for target in re.findall(r"_target_:\s*([\w.]+)", path.read_text()):
            assert callable(load(target)), f"{shown(path)}: {target}"


def test_every_option_of_a_plugin_names_its_class():
    plugins = {GROUP_OF_FOLDER.get(p.parent.name, p.parent.name) for p in sources(*PACKAGES) if p.name == "base.py"}
    for group in plugins:
        for path in option_files(group):
            config = yaml.safe_load(path.read_text())
            inherits = any(isinstance(entry, str) and entry != "_self_" for entry in config.get("defaults", []))
            assert "_target_" in config or inherits, f"{shown(path)} names no class"


def test_every_group_and_key_is_explained_by_the_help():
    text = (ROOT / "conf/hydra/help/miles.yaml").read_text()
    for word in (*CONFIG_GROUPS, "name", "seed", "steps", "plan_only", "resume"):
        assert re.search(rf"^ .*\b{word} {{2,}}\S", text, re.MULTILINE), f"-h does not explain {word}"


def test_an_experiment_is_at_most_40_lines_and_starts_with_its_command():
    assert option_files("experiment")
    for path in option_files("experiment"):
        lines = path.read_text().splitlines()
        assert len(lines) <= 40, shown(path)
        assert lines[0] == "# @package _global_", f"{shown(path)}: Hydra reads this only from the first line"
        assert re.match(rf"# python -m pipelines\.run \+experiment={path.stem}\b", lines[1]), shown(path)


def test_names_say_what_a_thing_is():
    assert [shown(path) for path in sources(*PACKAGES) if path.stem in ("utils", "helpers", "common", "misc")] == []
    vague = [
        f"{shown(path)}: {node.name}"
        for path in sources(*PACKAGES)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and re.search(r"Manager|Helper|Util", node.name)
    ]
    assert vague == []


def test_no_exception_is_swallowed_by_a_bare_except():
    bare = [
        f"{shown(path)}:{node.lineno}"
        for path in sources(*PACKAGES, "tests", "benchmarks")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert bare == []


def test_source_and_conf_are_ascii():
    files = [*sources(*PACKAGES, "tests", "benchmarks"), *(ROOT / "conf").rglob("*.yaml"), ROOT / "README.md"]
    files += [ROOT / name for name in ("pyproject.toml", "Makefile", ".ci/run", "constraints.txt")]
    assert [shown(path) for path in files if not path.read_text(encoding="utf-8").isascii()] == []


def test_nothing_is_left_for_later():
    marks = [
        f"{shown(path)}:{number}"
        for path in sources(*PACKAGES, "benchmarks")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"#.*\b(TODO|FIXME|XXX)\b|raise NotImplementedError", line)
    ]
    assert marks == []


def test_the_readme_s_commands_exist():
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = set(re.findall(r"^\s*make (\w+)", text, re.MULTILINE))
    assert {"run", "test"} <= used <= targets
    for module in set(re.findall(r"python -m ((?:pipelines|sandbox_env|miles_rl)[\w.]*)", text)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"README: python -m {module}"
    for path in set(re.findall(r"python ((?:benchmarks|tests)/[\w/]+\.py)", text)):
        assert (ROOT / path).exists(), f"README: {path}"
