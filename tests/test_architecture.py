"""What may import and call what, read from the source itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "async_wsync"
FILES = sorted(PACKAGE.rglob("*.py"))

# From what everything rests on to what rests on everything. A part may import from its own layer and those above it.
LAYERS = (
    {"errors"},
    {"arguments"},
    {"types"},
    {"core"},
    {"runtime"},
    {"progress", "report"},
    {
        "lock",
        "lock_adopt",
        "lock_client",
        "lock_bell",
        "lock_heart",
        "lock_hold",
        "lock_link",
        "lock_server",
        "lock_text",
        "lock_watch",
        "no_lock",
        "polled_lock",
    },
    {"engines"},
    {"sources"},
    {"calls", "own_checks"},
    {"rounds"},
    {
        "aftermath",
        "attempt",
        "broadcaster",
        "closing",
        "connecting",
        "critical",
        "fleet",
        "greeting",
        "links",
        "membership",
        "patience",
        "round_update",
        "story",
        "transfer",
        "turns",
        "update",
    },
    {"compat"},
    {"testing"},
    {"demo"},
    {"cli", "cli_lock", "cli_push", "__main__"},
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

# The update group in its parts: the only files that may use torch's private distributed API.
GROUP_FILES = {
    f"runtime/{name}.py"
    for name in (
        "gloo_wait",
        "gloo_wiring",
        "group_member",
        "group_source",
        "nccl",
        "process_group",
        "rendezvous",
        "sockets",
        "store",
        "update_group",
    )
}
CATCHES_EVERYTHING = {"runtime/cancellation.py", "runtime/threads.py", "lock_hold.py", "polled_lock.py"}
IMPURE = {"ray", "asyncio", "anyio", "time", "random", "secrets", "uuid", "threading", "socket"}


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def part_of(path: Path) -> str:
    return named_part(path.relative_to(PACKAGE).with_suffix("").parts[0])


def named_part(module: str) -> str:
    """The lock is one part in several files, lock_*.py."""
    return "lock" if module.startswith("lock_") else module


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def only_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def imported(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import that runs, wherever it stands."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt) and only_for_types(child):
            continue
        if isinstance(child, ast.Import):
            yield from ((child.lineno, alias.name) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: imports are absolute"
            yield from ((child.lineno, f"{child.module}.{alias.name}") for alias in child.names)
        yield from imported(child)


def dotted(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def places(path: Path, nodes: Iterator[ast.AST]) -> list[str]:
    return [f"{relative(path)}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)[:80]}" for node in nodes]


def test_every_part_has_its_layer() -> None:
    unknown = {part_of(path) for path in FILES} - LEVEL.keys() - {"__init__"}
    assert not unknown, f"add these to LAYERS: {sorted(unknown)}"


def test_imports_go_upward_only() -> None:
    wrong = []
    for path in FILES:
        level = LEVEL.get(part_of(path), -1)
        for line, name in imported(tree_of(path)):
            if name.startswith("async_wsync."):
                other = named_part(name.split(".")[1])
                if other in LEVEL and LEVEL[other] > level:
                    wrong.append(f"{relative(path)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_errors_import_nothing_of_ours() -> None:
    assert not [name for _, name in imported(tree_of(PACKAGE / "errors.py")) if name.startswith("async_wsync")]


def test_the_core_is_pure() -> None:
    wrong = [
        f"{relative(path)}:{line} imports {name}"
        for path in FILES
        if part_of(path) == "core"
        for line, name in imported(tree_of(path))
        if name.split(".")[0] in IMPURE
    ]
    assert not wrong, "\n".join(wrong)


def test_the_update_group_knows_no_ray() -> None:
    wrong = [
        f"{relative(path)}:{line} imports {name}"
        for path in FILES
        if relative(path) in GROUP_FILES
        for line, name in imported(tree_of(path))
        if name.split(".")[0] == "ray"
    ]
    assert not wrong, "\n".join(wrong)


BANNED = {
    "ray.get": "blocks; await the ref",
    "ray.wait": "blocks; await the refs",
    "time.sleep": "blocks; await, or wait on a condition",
    "asyncio.shield": "returns early when cancelled; use runtime.cancellation.finish",
    "asyncio.to_thread": "the default executor keeps the process alive; use DaemonWorker",
}


@pytest.mark.parametrize("name", BANNED)
def test_the_package_never_uses(name: str) -> None:
    wrong = [
        place
        for path in FILES
        for place in places(path, (node for node in ast.walk(tree_of(path)) if dotted(node) == name))
    ]
    assert not wrong, f"{BANNED[name]}:\n" + "\n".join(wrong)


def test_the_default_executor_is_never_used() -> None:
    wrong = [
        place
        for path in FILES
        for place in places(
            path,
            (
                node
                for node in ast.walk(tree_of(path))
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "run_in_executor"
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ),
        )
    ]
    assert not wrong, "\n".join(wrong)


def blocking_waits(function: ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """``x.wait(...)`` as a statement of its own or as a value, neither awaited nor handed to something."""
    stack: list[tuple[ast.AST, ast.AST]] = [(child, function) for child in ast.iter_child_nodes(function)]
    while stack:
        node, parent = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda | ast.AsyncFunctionDef):
            continue  # runs elsewhere, or is looked at by itself
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "wait"
            and not isinstance(parent, ast.Await | ast.Call)
        ):
            yield node
        stack.extend((child, node) for child in ast.iter_child_nodes(node))


def test_nothing_waits_on_the_event_loop() -> None:
    wrong = [
        place
        for path in FILES
        for function in ast.walk(tree_of(path))
        if isinstance(function, ast.AsyncFunctionDef)
        for place in places(path, blocking_waits(function))
    ]
    assert not wrong, "\n".join(wrong)


def catches_everything(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        dotted(kind).split(".")[-1] in {"BaseException", "CancelledError", "KeyboardInterrupt"} for kind in kinds
    )


def test_cancellation_is_caught_in_few_places() -> None:
    wrong = [
        place
        for path in FILES
        if relative(path) not in CATCHES_EVERYTHING
        for place in places(
            path,
            (
                node
                for node in ast.walk(tree_of(path))
                if isinstance(node, ast.ExceptHandler) and catches_everything(node)
            ),
        )
        if not place.startswith("cli.py")  # the command ends on Ctrl-C, outside of any loop
    ]
    assert not wrong, "\n".join(wrong)


def test_foreign_ray_errors_are_translated_in_one_file() -> None:
    wrong = [
        f"{relative(path)}:{line} imports {name}"
        for path in FILES
        if relative(path) != "runtime/object_refs.py"
        for line, name in imported(tree_of(path))
        if name.startswith("ray.exceptions")
    ]
    wrong += [
        place
        for path in FILES
        if relative(path) != "runtime/object_refs.py"
        for place in places(
            path, (node for node in ast.walk(tree_of(path)) if dotted(node).startswith("ray.exceptions"))
        )
    ]
    assert not wrong, "\n".join(wrong)


def is_private_distributed(name: str) -> bool:
    if not name.startswith(("torch.distributed", "dist.", "torch._C._distributed")):
        return False
    parts = name.split(".")
    if name.startswith("torch.distributed.tensor"):
        return any(part.startswith("_") for part in parts)
    return (
        "distributed_c10d" in parts
        or any(part.startswith("_") for part in parts)
        or any(part.startswith("ProcessGroup") and part != "ProcessGroup" for part in parts)
    )


def test_torch_private_distributed_api_is_used_by_the_update_group_only() -> None:
    wrong = []
    for path in FILES:
        if relative(path) in GROUP_FILES:
            continue
        tree = tree_of(path)
        wrong += [
            f"{relative(path)}:{line} imports {name}" for line, name in imported(tree) if is_private_distributed(name)
        ]
        wrong += places(path, (node for node in ast.walk(tree) if is_private_distributed(dotted(node))))
    assert not wrong, "\n".join(wrong)


def at_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """All nodes that run when a module is imported; the bodies of functions do not."""
    stack: list[ast.AST] = list(body)
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            stack.extend([*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)])
        elif not isinstance(node, ast.Lambda):
            stack.extend(ast.iter_child_nodes(node))


def test_importing_reads_no_environment_and_configures_no_logging() -> None:
    banned = {"os.environ", "os.getenv", "logging.basicConfig", "logging.config.dictConfig"}
    wrong = [
        place
        for path in FILES
        for place in places(path, (node for node in at_import(tree_of(path).body) if dotted(node) in banned))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_postpones_annotations_and_says_what_it_is_for() -> None:
    wrong = []
    for path in FILES:
        tree = tree_of(path)
        if not tree.body:
            continue
        if ast.get_docstring(tree) is None:
            wrong.append(f"{relative(path)} has no docstring")
        code = [node for node in tree.body if not isinstance(node, ast.Expr)]
        if code and "__future__.annotations" not in [name for _, name in imported(tree)]:
            wrong.append(f"{relative(path)} lacks `from __future__ import annotations`")
    assert not wrong, "\n".join(wrong)
