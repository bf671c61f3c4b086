"""No wait without a bound: the source is read for everything that could wait for ever.

A wait is bounded by a deadline around it (`asyncio.timeout`, `timeout_at`, `wait_for`, `deadline`) or by its own
`timeout`. Where the bound lies elsewhere, a comment on the line, or alone on the line above, says where:
`# bounded: <by what>`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("pipelines", "miles_rl", "sandbox_env")
DEADLINES = {"timeout", "timeout_at", "deadline", "_deadline", "_within"}
AWAITED = {"wait", "acquire", "get", "put", "join", "communicate", "gather", "shield", "to_thread", "run_in_executor"}
AWAITED |= {"sock_recv", "sock_sendall", "sock_connect", "sock_accept", "open_connection", "read", "readline", "drain"}
BLOCKING_WITHOUT_ARGUMENTS = {"wait", "acquire", "get", "join", "communicate", "result"}
SUBPROCESS = {"run", "call", "check_call", "check_output"}
NO_WAITS = {"HydraConfig.get()", "parser.result()"}


def name_of(node: ast.expr) -> str:
    """Last part of a dotted name or of what is called."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def has_timeout(call: ast.Call) -> bool:
    return any(k.arg and "timeout" in k.arg and ast.unparse(k.value) != "None" for k in call.keywords)


class Waits(ast.NodeVisitor):
    """Collects the lines of waits that nothing around them bounds."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._bounded = 0
        self._clocks: set[str] = set()
        self._awaited: set[int] = set()

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        before = self._bounded, self._clocks
        self._bounded, self._clocks = 0, set()  # what is defined inside a deadline may run outside of it
        self.generic_visit(node)
        self._bounded, self._clocks = before

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.value, ast.Call) and name_of(node.value) in DEADLINES:
            self._clocks |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        self.generic_visit(node)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        before = self._bounded
        for item in node.items:
            expression = item.context_expr
            if name_of(expression) in DEADLINES or (isinstance(expression, ast.Name) and expression.id in self._clocks):
                self._bounded += 1
            elif not isinstance(expression, ast.Call) or name_of(expression) == "TaskGroup":  # a lock, or a place
                self._note(node.lineno, f"async with {ast.unparse(expression)}")
            self.visit(expression)
        for child in node.body:
            self.visit(child)
        self._bounded = before

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self._note(node.lineno, f"async for ... in {ast.unparse(node.iter)}")
        self.generic_visit(node)

    def visit_Await(self, node: ast.Await) -> None:
        value = node.value
        if not isinstance(value, ast.Call):
            self._note(node.lineno, f"await {ast.unparse(value)}")
        elif name_of(value) == "wait_for":
            for argument in value.args[:1]:
                self._awaited |= {id(inner) for inner in ast.walk(argument)}
        elif name_of(value) in AWAITED and not has_timeout(value):
            self._note(node.lineno, f"await {ast.unparse(value)}")
        self._awaited.add(id(value))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name, text = name_of(node), ast.unparse(node)
        if id(node) not in self._awaited and isinstance(node.func, ast.Attribute) and text not in NO_WAITS:
            in_subprocess = name in SUBPROCESS and text.startswith("subprocess.")
            bare = name in BLOCKING_WITHOUT_ARGUMENTS and not node.args
            if (in_subprocess or bare) and not has_timeout(node):
                self._note(node.lineno, text)
            if name == "waitpid" and ast.unparse(node.args[-1]) == "0":
                self._note(node.lineno, text)
        if name in ("urlopen", "create_connection") and not has_timeout(node):
            self._note(node.lineno, text)
        self.generic_visit(node)

    def _note(self, line: int, text: str) -> None:
        if not self._bounded:
            self.found.append((line, " ".join(text.split())[:100]))


def unbounded(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every wait in `source` that nothing bounds and no comment explains."""
    lines = source.splitlines()
    waits = Waits()
    waits.visit(ast.parse(source))
    for line, text in sorted(set(waits.found)):
        above = lines[line - 2].strip() if line > 1 else ""
        if "# bounded: " not in lines[line - 1] and not above.startswith("# bounded: "):
            yield line, text


def test_every_wait_has_a_bound_or_says_what_bounds_it():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in unbounded(path.read_text())
    ]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(
    "body",
    [
        "await event.wait()",
        "await task",
        "await asyncio.gather(a(), b())",
        "await asyncio.to_thread(work)",
        "async with self._lock: pass",
        "async with asyncio.TaskGroup() as group: pass",
        "subprocess.run(['true'])",
        "process.wait()",
        "future.result()",
        "os.waitpid(pid, 0)",
        "async for line in stream: pass",
        "await asyncio.wait([task], timeout=None)",
    ],
)
def test_a_wait_without_a_bound_is_found(body: str):
    assert len(list(unbounded(f"async def f():\n    {body}\n"))) == 1


@pytest.mark.parametrize(
    "body",
    [
        "async with asyncio.timeout(3):\n        await event.wait()",
        "clock = asyncio.timeout(3)\n    async with clock:\n        await event.wait()",
        "async with self._deadline('the step'):\n        await asyncio.to_thread(work)",
        "await asyncio.wait_for(event.wait(), 3)",
        "await asyncio.wait([task], timeout=3)",
        "process.wait(timeout=3)",
        "' '.join(words)",
        "config.get('key')",
        "await task  # bounded: by its own deadline",
        "# bounded: by the stop of the stage\n    await task",
        "os.waitpid(pid, os.WNOHANG)",
    ],
)
def test_a_wait_with_a_bound_is_not(body: str):
    assert list(unbounded(f"async def f():\n    {body}\n")) == []


def test_a_deadline_around_a_definition_bounds_nothing_inside_it():
    source = (
        "async def f():\n    async with asyncio.timeout(3):\n        async def g():\n            await event.wait()\n"
    )
    assert len(list(unbounded(source))) == 1
