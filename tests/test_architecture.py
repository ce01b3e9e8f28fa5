"""What may import and call what, read from the source itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support import architecture

PACKAGE = Path(__file__).resolve().parent.parent / "async_wsync"
FILES = sorted(PACKAGE.rglob("*.py"))

# From what everything rests on to what rests on everything: folders, and files where a folder has an order inside.
# A file may import from its own layer and from those above it.
LAYERS = (
    {"errors", "phases"},
    {"arguments"},
    {"types"},
    {"protocols"},
    {"transfer/tensors", "transfer/recall"},
    {"transfer"},
    {"runtime/backoff", "runtime/foreign_code", "runtime/threads", "runtime/loop_gap", "runtime/signals"},
    {"runtime/cancellation", "runtime/cuda_streams", "runtime/torch_threads"},
    {"runtime/object_refs", "runtime/engine_calls"},
    {"runtime"},
    {"groups/sockets", "groups/socket_watch"},
    {"groups/master_address", "groups/store"},
    {"groups/gloo", "groups/nccl"},
    {"groups/process_group"},
    {"groups/source_end", "groups/member_end"},
    {"groups/rendezvous"},
    {"groups/manager"},
    {"progress", "report"},
    {"lock/state", "lock/claim", "lock/messages", "lock/status_text", "lock/wake_up", "lock/null"},
    {"lock/lease", "lock/server"},
    {"lock/hold", "lock/bool_lock"},
    {"lock"},
    {"rounds/state"},
    {"rounds/server", "rounds/member"},
    {"rounds"},
    {"engines/replies", "engines/rejection", "engines/request_ids", "engines/update_codec"},
    {"engines/failure", "engines/http"},
    {"engines/receiving/group_membership", "engines/receiving/weight_state", "engines/receiving/serving_gate"},
    {"engines/receiving/group_memberships", "engines/receiving/request_log"},
    {"engines/receiving/admission"},
    {"engines/receiving/receiving_end"},
    {"engines/sglang/messages", "engines/sglang/checkpoint_index", "engines/sglang/transport"},
    {"engines/sglang/names", "engines/sglang/http_transport", "engines/sglang/actor_transport"},
    {"engines/torch", "engines/sglang", "engines/vllm"},
    {"sources/tensors", "sources/participate"},
    {"sources"},
    {"update/life_cycle", "update/roster", "update/history", "update/blame", "update/retries"},
    {"update/cancellation", "update/fleet", "update/hello", "update/verification", "update/locked_work"},
    {"update/context"},
    {"update/turns", "update/membership", "update/connect", "update/close", "update/pipeline"},
    {"update/attempt"},
    {"update/recovery"},
    {"update/update"},
    {"update/shared"},
    {"broadcaster"},
    {"integrations"},
    {"testing"},
    {"demo"},
    {"cli", "__main__"},
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

# The folder of update groups: the only files that may use torch's private distributed API.
GROUP_FILES = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.glob("groups/*.py")}
# State machines: they are told the time, and draw no random numbers.
PURE = {
    "lock/state.py",
    "lock/claim.py",
    "lock/messages.py",
    "rounds/state.py",
    "runtime/backoff.py",
    "update/life_cycle.py",
    "update/roster.py",
}
CATCHES_EVERYTHING = {"runtime/cancellation.py", "runtime/threads.py", "lock/hold.py", "lock/bool_lock.py"}
IMPURE = {"ray", "asyncio", "anyio", "time", "random", "secrets", "uuid", "threading", "socket"}


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def level_of(module: str) -> int | None:
    """Of a path without ``.py``: its own level, or that of the nearest folder that has one."""
    parts = module.split("/")
    names = ("/".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((LEVEL[name] for name in names if name in LEVEL), None)


def module_of(path: Path) -> str:
    return relative(path).removesuffix(".py")


def imported_module(name: str) -> str:
    """The path, without ``.py``, of the module that an import of ``async_wsync.…`` reaches."""
    parts = name.split(".")[1:]
    while parts and not (PACKAGE.joinpath(*parts).with_suffix(".py").exists() or PACKAGE.joinpath(*parts).is_dir()):
        parts.pop()  # the name of something in a module
    return "/".join(parts)


@cache
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


def test_every_file_has_its_layer() -> None:
    unknown = [relative(path) for path in FILES if path.name != "__init__.py" and level_of(module_of(path)) is None]
    assert not unknown, f"add these to LAYERS: {unknown}"


def test_every_layer_is_there() -> None:
    gone = [
        part for part in LEVEL if not PACKAGE.joinpath(part).is_dir() and not PACKAGE.joinpath(f"{part}.py").exists()
    ]
    assert not gone, f"take these out of LAYERS: {gone}"


def test_imports_go_upward_only() -> None:
    wrong = []
    for path in FILES:
        level = level_of(module_of(path))
        if level is None:
            continue
        for line, name in imported(tree_of(path)):
            if name.startswith("async_wsync."):
                other = level_of(imported_module(name))
                if other is not None and other > level:
                    wrong.append(f"{relative(path)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_errors_import_nothing_of_ours() -> None:
    assert not [name for _, name in imported(tree_of(PACKAGE / "errors.py")) if name.startswith("async_wsync")]


def test_state_machines_and_transfer_are_pure() -> None:
    wrong = [
        f"{relative(path)}:{line} imports {name}"
        for path in FILES
        if relative(path) in PURE or relative(path).startswith("transfer/")
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
        if not place.startswith("cli/main.py")  # the command ends on Ctrl-C, outside of any loop
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


PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text()


def test_the_picture_of_the_folders_is_the_codes_own() -> None:
    assert architecture.shown() == architecture.picture(), "python -m tests.support.architecture draws it anew"


def test_one_update_is_read_in_at_most_18_files() -> None:
    files = re.findall(r"^\| (\d+) \| `([\w/]+\.py)` \|", PAGE, re.MULTILINE)
    assert [int(number) for number, _ in files] == list(range(1, len(files) + 1))
    assert 1 < len(files) <= 18
    assert not [name for _, name in files if not (PACKAGE / name).exists()]


def test_every_promise_names_the_functions_that_keep_it() -> None:
    rows = dict(re.findall(r"^\| (G\d+) [^|]*\| (.*) \|$", PAGE, re.MULTILINE))
    assert list(rows) == [f"G{n}" for n in range(1, 13)]
    wrong = []
    for promise, places_ in rows.items():
        for file, name in re.findall(r"`([\w/]+\.py):(\w+)`", places_):
            named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            path = PACKAGE / file
            defined = (
                {node.name for node in ast.walk(tree_of(path)) if isinstance(node, named)} if path.exists() else set()
            )
            if name not in defined:
                wrong.append(f"{promise}: {file} has no {name}")
    assert not wrong, "\n".join(wrong)


TESTS = PACKAGE.parent / "tests"


def test_no_test_module_imports_another() -> None:
    """What two test modules share lives in a module of helpers."""
    wrong = [
        f"{path.relative_to(TESTS)}:{line} imports {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for line, name in imported(tree_of(path))
        if name.startswith("tests.") and any(part.startswith("test_") for part in name.split("."))
    ]
    assert not wrong, "\n".join(wrong)


def test_what_folders_of_tests_share_lives_in_support() -> None:
    wrong = [
        f"{path.relative_to(TESTS)}:{line} imports {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for line, name in imported(tree_of(path))
        if name.startswith("tests.") and name.split(".")[1] not in {"support", path.relative_to(TESTS).parts[0]}
    ]
    assert not wrong, "\n".join(wrong)
