"""Checkpointed and offloaded layers of whole and split models, against the plain model in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.init import shutdown
from opensmd.modelparallel.runtime.tensors.storages import StorageReference
from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint, checkpoint_sequential
from tests.support.equality import equal_gradients
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
ROWS, WIDTH, LAYERS = 8, 6, 8


class Layer(nn.Module):
    """Residual, with dropout; passes a second value through as transformers' layers pass masks."""

    calls = 0  # of all layers of the process, in forward and again in backward
    inputs: list[StorageReference] = []  # noqa: RUF012  # seen by all layers of the process
    most_alive = 0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, given: Any) -> Any:
        x, mask = given if isinstance(given, tuple) else (given, None)
        if not smp.is_tracing():
            Layer.calls += 1
            Layer.inputs = [known for known in Layer.inputs if not known.expired()]
            Layer.inputs.append(StorageReference(x.untyped_storage()))
            Layer.most_alive = max(Layer.most_alive, len({known._reference.cdata for known in Layer.inputs}))
        h = x + self.drop(self.down(torch.tanh(self.up(x))))
        return h if mask is None else (h * mask, mask)


class Section(nn.Sequential):
    """Layers that are run in one of the documented ways; with "plain" before it, without checkpoints."""

    def __init__(self, how: str, layers: int) -> None:
        super().__init__(*(Layer() for _ in range(layers)))
        self.how = how

    def prepare(self) -> None:
        """What a script does after wrapping the model."""
        if self.how.startswith("set on layers"):
            for layer in self.children():
                smp.set_activation_checkpointing(layer)
        elif self.how.startswith("set, "):
            packed = {"pack_args_as_tuple": True} if "packed" in self.how else {}
            smp.set_activation_checkpointing(self, strategy=self.how.split(", ")[1], **packed)


class Residual(Section):
    """A Sequential with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + super().forward(x)
        return out


class Net(nn.Module):
    """Sections one after the other."""

    def __init__(self, hows: Sequence[str], layers: int) -> None:
        super().__init__()
        self.start, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.sections = nn.ModuleList(
            (Residual if "residual" in how else Section)(how, layers) for how in hows
        )

    def forward(self, x: Tensor) -> Tensor:
        h: Any = self.start(x)
        for section in self.sections:
            given = (h, torch.ones_like(x) / 2) if "packed" in section.how else h
            if section.how == "checkpoint":
                for layer in section:
                    given = checkpoint(layer, given)
            elif section.how == "sequential":
                given = smp.checkpoint_sequential(section, given, strategy="group_3")
            elif section.how == "packed":
                given = checkpoint_sequential(section, given, strategy="group_2", pack_args_as_tuple=True)
            else:
                given = section(given)
            h = given[0] if "packed" in section.how else given
        out: Tensor = self.head(h)
        return out


HOWS = (
    "checkpoint",
    "sequential",
    "packed",
    "set on layers",
    "set on layers, packed",
    "set, each",
    "set, contiguous",
    "set, group_2",
    "set, group_3, packed",
    "set, each, residual",
    "set, contiguous, residual",
)


def gradients(
    hows: Sequence[str], partitions: int, *, layers: int = 3, **settings: Any
) -> tuple[list[float], dict[str, Tensor | None]]:
    """Two steps' losses, averaged over replicas, and this rank's gradients."""
    shutdown()
    smp.init({"partitions": partitions, "microbatches": 2, "ddp": True, **settings})
    torch.manual_seed(0)
    model = smp.DistributedModel(Net(hows, layers))
    for section in model.get_module().sections:
        section.prepare()
    model.eval() if dist.get_world_size() > 1 else model.train()  # stages draw dropout of their own
    Layer.calls = Layer.most_alive = 0

    @smp.step
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    losses = []
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(smp.dp_size() * ROWS, WIDTH, generator=generator).chunk(smp.dp_size())[smp.dp_rank()]
        loss = step(x).reduce_mean()
        dist.all_reduce(loss, group=smp.get_dp_process_group())
        losses.append(loss.item() / smp.dp_size())
    return losses, {name: value.grad for name, value in model.local_named_parameters()}


def every_way(partitions: int) -> None:
    """All ways give the same as no checkpoints, and run every layer of this rank twice."""
    wanted = gradients([f"plain {how}" for how in HOWS], partitions)
    once = Layer.calls
    for settings in ({}, {"offload_activations": True, "activation_loading_horizon": 3}):
        found = gradients(HOWS, partitions, **settings)
        assert found[0] == wanted[0]
        for name, gradient in wanted[1].items():
            torch.testing.assert_close(found[1][name], gradient, rtol=1e-6, atol=1e-8, msg=name)
        assert Layer.calls == 2 * once


def offloaded(partitions: int) -> list[int]:
    """How many layers' inputs of one microbatch at most were in memory, without and with offloading."""
    most = []
    for settings in ({}, {"offload_activations": True, "activation_loading_horizon": 2}):
        for how in ("set, each", "set on layers"):
            gradients([how], partitions, layers=LAYERS, active_microbatches=1, **settings)
            most.append(Layer.most_alive)
    return most


def idle() -> None:
    """Nothing is checkpointed, so nothing is offloaded."""
    with pytest.warns(UserWarning, match="offload_activations=True has had no effect"):
        gradients(["plain"], 1, offload_activations=True)


@pytest.mark.parametrize(("world", "partitions"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_checkpointed_and_offloaded_layers_give_the_plain_models_gradients(
    pool: Pools, world: int, partitions: int
) -> None:
    pool(world).run(every_way, partitions)


def of_transformers(partitions: int) -> list[Any]:
    """Losses of a Hugging Face model that checkpoints by itself, and how many inputs left memory."""
    found = []
    ways = [(False, {}), *((way, {"offload_activations": True}) for way in (False, True))]
    for reentrant, settings in ways:
        shutdown()
        smp.init({"partitions": partitions, "microbatches": 2, **settings})
        torch.manual_seed(0)
        sizes = {"n_layer": 4, "n_head": 2, "n_embd": 8, "n_positions": 8, "vocab_size": 16}
        drop = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drop))
        net.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model = smp.DistributedModel(net)

        @smp.step
        def step(model: Any, ids: Tensor) -> Tensor:
            loss: Tensor = model(input_ids=ids, labels=ids).loss
            model.backward(loss)
            return loss

        losses = [step(model, torch.arange(16).reshape(2, 8)).reduce_mean().item() for _ in range(2)]
        norm = sum(float(each.grad.norm()) for each in model.local_parameters())
        found.append(([*losses, norm], smp.state.offloading and smp.state.offloading.count))
    return found


@pytest.mark.parametrize("partitions", [1, 2])
def test_checkpoints_that_a_hugging_face_model_makes_are_offloaded(pool: Pools, partitions: int) -> None:
    for (kept, _), *offloaded in pool(partitions).run(of_transformers, partitions):
        for numbers, count in offloaded:
            assert numbers == pytest.approx(kept, rel=1e-6)
            assert count >= 2 * 2 * (4 / partitions - 1)  # steps, microbatches, and layers but a first one


def test_offloading_leaves_at_most_the_horizon_of_layers_in_memory(pool: Pools) -> None:
    assert pool(1).run(offloaded, 1) == [[LAYERS, LAYERS, 2, 2]]
    for before, _, *after in pool(2).run(offloaded, 2):
        assert before >= 3 and max(after) <= 2


def test_offloading_says_once_if_nothing_is_checkpointed(pool: Pools) -> None:
    pool(1).run(idle)


def make_falcon() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 16}
    config = transformers.FalconConfig(**sizes, new_decoder_architecture=False, use_cache=True)
    return transformers.FalconForCausalLM(config)


def layers_that_fill_a_cache(partitions: int) -> None:
    ids = torch.arange(16).reshape(2, 8)
    plain = make_falcon()
    wanted = plain(input_ids=ids, labels=ids).loss
    wanted.backward()
    for settings in ({}, {"offload_activations": True, "activation_loading_horizon": 1}):
        shutdown()
        smp.init({"partitions": partitions, "microbatches": 1, **settings})
        model = smp.DistributedModel(make_falcon())
        for layer in model.get_module().transformer.h:
            smp.set_activation_checkpointing(layer)

        @smp.step
        def step(model: Any) -> Tensor:
            cache = transformers.DynamicCache()  # whose layers come one by one
            loss: Tensor = model(input_ids=ids, labels=ids, past_key_values=cache).loss
            model.backward(loss)
            assert cache.get_seq_length() == 8, "backward leaves the cache as forward does"
            return loss

        torch.testing.assert_close(step(model).reduce_mean(), wanted.detach())
        local = {name for name, _ in model.local_named_parameters()}
        assert local == set(equal_gradients(model.get_module(), plain))


@pytest.mark.parametrize("partitions", [1, 2])
def test_checkpointed_layers_may_fill_a_cache(pool: Pools, partitions: int) -> None:
    pool(partitions).run(layers_that_fill_a_cache, partitions)
