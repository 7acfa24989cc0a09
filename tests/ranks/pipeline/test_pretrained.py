"""Weights that lie in a mapped file or in NumPy's memory, as those of every pretrained model do."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from tests.support.equality import Pools
from tests.support.partitioned import restart

MICROBATCHES, STEPS, WIDTH = 3, 3, 8


def tiny(*, tied: bool = True) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=4, n_embd=16, n_head=2, vocab_size=50, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def from_safetensors(folder: str) -> nn.Module:
    """The usual ``from_pretrained``, of a checkpoint of several files."""
    return transformers.GPT2LMHeadModel.from_pretrained(folder).train()


def from_mapped_pickle(folder: str) -> nn.Module:
    """Tied weights come as two parameters in the same memory."""
    module = tiny()
    module.load_state_dict(torch.load(f"{folder}/weights.pt", mmap=True), assign=True)
    assert module.lm_head.weight is not module.transformer.wte.weight
    return module


def from_numpy(folder: str) -> nn.Module:
    """Frozen mapped weights and an adapter of NumPy's."""
    module = from_safetensors(folder).requires_grad_(False)
    for block in module.transformer.h:
        shape = tuple(block.mlp.c_proj.bias.shape)
        block.mlp.c_proj.bias = nn.Parameter(torch.from_numpy(numpy.full(shape, 0.25, numpy.float32)))
    return module


def from_one_storage(folder: str) -> nn.Module:
    """All weights are pieces of one tensor."""
    module = from_safetensors(folder)
    parameters = list(module.parameters())
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    for parameter, piece in zip(
        parameters, flat.split([parameter.numel() for parameter in parameters]), strict=True
    ):
        parameter.data = piece.view(parameter.shape)
    return module


LOADERS: Mapping[str, Callable[[str], nn.Module]] = {
    one.__name__: one for one in (from_safetensors, from_mapped_pickle, from_numpy, from_one_storage)
}


def plainly_trained(module: nn.Module, ids: Tensor) -> nn.Module:
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in ids.chunk(MICROBATCHES):
            (module(input_ids=part, labels=part, use_cache=False).loss / MICROBATCHES).backward()
        optimizer.step()
    return module


def train(loader: str, folder: str, stages: int) -> None:
    restart(partitions=stages, microbatches=MICROBATCHES)
    module = LOADERS[loader](folder)
    before = {name: weight.data_ptr() for name, weight in module.named_parameters()}
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1))

    @smp.step
    def step(ids: Tensor) -> None:
        model.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)

    ids = torch.randint(50, (2 * MICROBATCHES, 8), generator=torch.Generator().manual_seed(1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        step(ids)
        optimizer.step()
    here = dict(model.local_named_parameters())
    assert 0 < len(here) < len(before)
    for name, parameter in module.named_parameters():
        if name in here:
            assert parameter.data_ptr() == before[name]
        else:
            assert not parameter.untyped_storage().nbytes()
    tied = ("transformer.wte.weight", "lm_head.weight")
    assert len({model.is_local(name) for name in tied}) == 1
    assert (module.lm_head.weight is module.transformer.wte.weight) == (loader != "from_mapped_pickle")
    gathered = model.state_dict()
    torch.testing.assert_close(gathered, plainly_trained(LOADERS[loader](folder), ids).state_dict())
    if loader == "from_safetensors":
        gc.collect()
        assert mapped_files(folder) == {files_of(folder)[name] for name in here}
    smp.shutdown()


def mapped_files(folder: str) -> set[str]:
    """The files of ``folder`` in this process's memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split()[-1]).name for line in lines if folder in line}


def files_of(folder: str) -> dict[str, str]:
    """In which file each parameter is."""
    found = {}
    for path in Path(folder).glob("*.safetensors"):
        found.update(dict.fromkeys(load_file(path), path.name))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pretrained")
    module = tiny()
    module.save_pretrained(path, max_shard_size="12KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    torch.save(module.state_dict(), path / "weights.pt")
    return str(path)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_split_pretrained_model_trains_like_plain_pytorch(
    pool: Pools, folder: str, loader: str, stages: int
) -> None:
    pool(stages).run(train, loader, folder, stages)


def train_with_buffers(folder: str) -> None:
    """Each stage's weights and running statistics come from a file of their own."""
    restart(partitions=2, microbatches=2, auto_partition=False, default_partition=0)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)]
    for number, stage in enumerate(stages):
        stage.load_state_dict(load_file(f"{folder}/{number}.safetensors"), assign=True)
    module = nn.Sequential(*stages)
    plain = copy.deepcopy(module)
    smp.set_partition(stages[1], 1)
    model = smp.DistributedModel(module)
    step = smp.step(lambda x: model.backward(model(x).square().mean()))
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    step(x)
    for part in x.chunk(2):
        (plain(part).square().mean() / 2).backward()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    gc.collect()
    assert mapped_files(folder) == {f"{smp.pp_rank()}.safetensors"}
    smp.shutdown()


def test_buffers_of_another_stage_keep_no_file_mapped(pool: Pools, tmp_path: Path) -> None:
    for number in range(2):
        stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        save_file(stage.state_dict(), tmp_path / f"{number}.safetensors")
    pool(2).run(train_with_buffers, str(tmp_path))
