"""Wrapped models have the names of the plain one, at both ends; a prefix that is left over is told in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from async_wsync.engines.rejection import Findings
from async_wsync.engines.sglang.checkpoint_index import CheckpointIndex
from async_wsync.engines.sglang.names import against_index
from async_wsync.engines.torch.targets import check_manifest, named_targets
from async_wsync.errors import EngineRejected
from async_wsync.sources import ModuleSource, StateDictSource
from async_wsync.transfer.module_state import module_state
from async_wsync.types import Manifest, UpdateSpec


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 3)
        self.module = nn.Linear(3, 3)  # a name of its own, not a wrapper's
        self.norm = nn.BatchNorm1d(3)


def plain() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Block(), Block(), nn.Linear(3, 3))


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = Path(tmp_path_factory.mktemp("rank")) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model: nn.Module) -> Any:
    return torch.compile(model)


def with_inner(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    def wrapped(model: Any) -> nn.Module:
        model[0] = wrap(model[0])
        model[1].module = wrap(model[1].module)
        return model  # type: ignore[no-any-return]

    return wrapped


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "compile": compiled,
    "ddp": DistributedDataParallel,
    "data parallel": nn.DataParallel,
    "compile of ddp of compile": lambda model: compiled(DistributedDataParallel(compiled(model))),
    "ddp of compile": lambda model: DistributedDataParallel(compiled(model)),
    "compile of data parallel": lambda model: compiled(nn.DataParallel(model)),
    "compile within": with_inner(compiled),
    "checkpointing within": with_inner(checkpoint_wrapper),
    "compile of checkpointing within": with_inner(lambda m: compiled(checkpoint_wrapper(m))),
    "checkpointing of compile within": with_inner(lambda m: checkpoint_wrapper(compiled(m))),
    "ddp of compile within checkpointing": lambda model: DistributedDataParallel(
        with_inner(lambda m: checkpoint_wrapper(compiled(m)))(model)
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("how", WRAPPED)
def test_a_wrapped_model_is_sent_and_received_under_the_plain_models_names(how: str) -> None:
    model = plain()
    expected = list(model.state_dict())
    tensors = {name: tensor.data_ptr() for name, tensor in model.state_dict(keep_vars=True).items()}
    source = ModuleSource(WRAPPED[how](model))
    manifest = source.manifest()
    assert [meta.name for meta in manifest.params] == expected
    assert {name: tensor.data_ptr() for name, tensor in source.tensors()} == tensors
    assert source.device == torch.device("cpu")
    assert not source.collective
    assert check_manifest(manifest, named_targets(WRAPPED[how](plain())), strict=True) == ()


def test_rename_and_include_see_the_plain_names() -> None:
    seen: list[str] = []

    def include(name: str) -> bool:
        seen.append(name)
        return name.startswith("2.")

    source = ModuleSource(compiled(plain()), include=include, rename=lambda name: f"model.{name}")
    assert [meta.name for meta in source.manifest().params] == ["model.2.weight", "model.2.bias"]
    assert seen == list(plain().state_dict())


def test_ties_across_a_wrapper_are_still_ties() -> None:
    model = plain()
    model[2].weight = model[0].up.weight
    aliases = ModuleSource(DistributedDataParallel(compiled(model))).manifest().aliases
    assert aliases == (("2.weight", "0.up.weight"),)


def test_two_tensors_that_unwrapping_would_give_one_name_are_refused() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_buffer("weight", torch.zeros(2))
    with pytest.raises(ValueError, match="'weight', which another tensor has"):
        module_state(model)


# ---------------------------------------------------------------------------- what a refusal says


def manifest_of(model: nn.Module, prefix: str = "", *, cut: str = "") -> Manifest:
    state = model.state_dict()
    return StateDictSource({prefix + name.removeprefix(cut): t for name, t in state.items()}).manifest()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("sent", "here", "rename"),
    [
        ("module.", "", "lambda name: name.removeprefix('module.')"),
        ("_orig_mod.", "", "lambda name: name.removeprefix('_orig_mod.')"),
        ("", "model.", "lambda name: 'model.' + name"),
        ("module.", "language_model.model.", "lambda name: 'language_model.model.' + name.removeprefix('module.')"),
    ],
)
def test_a_prefix_that_alone_differs_is_told_in_one_line(sent: str, here: str, rename: str, strict: bool) -> None:
    targets = {here + name: tensor for name, tensor in named_targets(plain()).items()}
    manifest = manifest_of(plain(), sent)
    with pytest.raises(EngineRejected) as caught:
        check_manifest(manifest, targets, strict=strict)
    message = str(caught.value)
    assert message.endswith(f"'{here}0.up.weight' is here: give the source rename={rename}")
    assert message.count(",") < 2 and "\n" not in message and len(message) < 300
    assert set(caught.value.unknown) == {meta.name for meta in manifest.params}
    assert bool(caught.value.missing) == strict
    fixed = {eval(rename)(meta.name) for meta in manifest.params}
    assert fixed == targets.keys()


def test_the_other_engines_say_it_in_the_same_line() -> None:
    shapes = {f"model.{name}": tuple(t.shape) for name, t in plain().state_dict().items()}
    manifest = manifest_of(plain())
    update = UpdateSpec(update_id="u", version=1, manifest=manifest, buckets=(), group="g")
    index = CheckpointIndex(shapes=shapes, ties_embeddings=False)
    from_sglang = str(against_index(update, index).rejection(engine="e0"))
    names = tuple(meta.name for meta in manifest.params)
    from_vllm = str(Findings(unknown=names, missing=tuple(shapes)).rejection(engine="e0"))
    assert from_sglang == from_vllm
    assert from_sglang.startswith("e0: the update does not fit: ")
    assert from_sglang.endswith("rename=lambda name: 'model.' + name")


def test_names_that_differ_otherwise_are_listed_and_no_prefix_is_made_up() -> None:
    targets = named_targets(plain())
    manifest = StateDictSource({"other.weight": torch.zeros(3, 3)}).manifest()
    with pytest.raises(EngineRejected, match=r"1 unknown here \(other.weight\); \d+ missing") as caught:
        check_manifest(manifest, targets, strict=True)
    assert "prefix" not in str(caught.value)


def test_what_is_missing_beside_a_prefix_is_listed_too() -> None:
    targets = named_targets(plain()) | {"extra": torch.zeros(1)}
    with pytest.raises(EngineRejected, match=r"missing in the update .*by a prefix only"):
        check_manifest(manifest_of(plain(), "module."), targets, strict=True)
