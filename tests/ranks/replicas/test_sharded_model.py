"""Models whose parameters replicas share out: trained as in one process, at every degree."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPCheckpointError, SMPError, SMPUnsupportedError
from opensmd.modelparallel.init import shutdown
from opensmd.modelparallel.sharding.trained_slices import is_cut
from smdistributed.modelparallel.torch.sharded_data_parallel_checkpoint import (
    get_full_state_dict_from_sharded_data_parallel_checkpoint,
)
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
WIDTH, ROWS, STEPS = 15, 8, 3
# a model this small is gathered as a whole unless told otherwise
BY_BLOCK = {"sdp_param_persistence_threshold": 0, "sdp_max_live_parameters": 1, "sdp_gradient_clipping": 0.0}
AT_ONCE = {"sdp_gradient_clipping": 0.0}


class Block(nn.Module):
    """With a norm, so that not all parameters can be cut into equal pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inside = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(self.norm(x))


class Net(nn.Module):
    """Blocks between an embedding and a head that share a weight, and a parameter without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("offset", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.scale


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(WIDTH, (4 * ROWS, 3), generator=generator)


def loss_of(output: Tensor, x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def step_of(model: smp.DistributedModel) -> Callable[[Tensor], Any]:
    """A step of training that returns its loss."""

    @smp.step
    def step(x: Tensor) -> Tensor:
        loss = loss_of(model(x), x)
        model.backward(loss)
        return loss

    return step


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def in_one_process(dtype: torch.dtype = torch.float32, clip: float = 0.0) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Net().to(dtype)
    optimizer = adam(net.parameters())
    losses, norms, grads = [], [], {}
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net(batch(number)).float(), batch(number))
        loss.backward()
        losses.append(loss.item())
        grads = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), clip or float("inf"))))
        optimizer.step()
    return {"losses": losses, "norms": norms, "grads": grads, "model": net.state_dict()}


class Training:
    """A script that shards its model."""

    def __init__(
        self, partitions: int = 1, degree: int | None = None, *, checkpointed: bool = False, **settings: Any
    ) -> None:
        shutdown()
        degree = degree or dist.get_world_size() // partitions
        sharding = {"sharded_data_parallel_degree": degree, "partitions": partitions, "ddp": True}
        smp.init(sharding | settings)
        torch.manual_seed(smp.rank())  # the first replica's values are everybody's
        if smp.dp_rank() == 0:
            torch.manual_seed(0)
        with smp.model_creation():
            net = Net()
        self.model = model = smp.DistributedModel(net)
        if checkpointed:
            for block in model.get_module().blocks:
                smp.set_activation_checkpointing(block)
        self.optimizer = smp.DistributedOptimizer(adam(model.parameters()))
        self.step = step_of(model)

    def train(self, number: int) -> float:
        self.optimizer.zero_grad()
        loss = self.step(batch(number).chunk(smp.rdp_size())[smp.rdp_rank()]).reduce_mean()
        dist.all_reduce(loss)
        self.optimizer.step()
        return float(loss) / dist.get_world_size()


def part_of(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """What this rank has of a tensor like ``parameter``."""
    if parameter.dim() == 0 or type(parameter) is nn.Parameter:
        return whole
    parts = whole.chunk(smp.state.groups.shards.size())
    rank = smp.state.groups.shards.rank()
    return parts[rank] if rank < len(parts) else whole[:0]


def trains_as_one_process(
    partitions: int, degree: int | None, settings: dict[str, Any], evaluated: bool = False
) -> None:
    expected = in_one_process()
    training = Training(partitions, degree, **settings)
    if evaluated:  # by the first step of all
        with torch.inference_mode():
            smp.step(lambda x: training.model(x))(batch(0))
    losses, norms = [], []
    for number in range(STEPS):
        losses.append(training.train(number))
        norms.append(training.optimizer._global_grad_norm)
    close = {"rtol": 1e-6, "atol": 1e-7}
    torch.testing.assert_close(losses, expected["losses"], **close)
    torch.testing.assert_close(norms, expected["norms"], rtol=1e-5, atol=0)
    for name, parameter in training.model.local_named_parameters():
        grad = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        wanted = part_of(expected["grads"][name], parameter)
        torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        dict(training.model.state_dict()), dict(expected["model"]), rtol=1e-4, atol=1e-5
    )


def keeps_its_part_alone() -> None:
    training = Training(**BY_BLOCK)
    parts = [each.ds_tensor for each in training.model.parameters() if each.dim() > 0]
    whole = [each.ds_numel for each in training.model.parameters() if each.dim() > 0]
    shapes = {name: each.shape for name, each in Net().named_parameters()}
    assert {name: each.ds_shape for name, each in training.model.get_module().named_parameters()} == shapes
    assert dist.get_world_size(training.optimizer.ds_param_shard_group) == smp.rdp_size()
    assert sum(each.ds_numel for each in parts) <= 1.05 * sum(whole) / smp.rdp_size() + 10 * WIDTH
    before = [each.clone() for each in parts]
    training.train(0)
    assert not any(torch.equal(part, old) for part, old in zip(parts, before, strict=True) if len(part))
    state = training.optimizer.state.values()
    kept = sum(each.numel() for entries in state for each in entries.values() if each.dim() > 0)
    assert kept == 2 * sum(each.ds_numel for each in parts)
    with torch.no_grad():
        smp.step(lambda x: training.model(x).sum())(batch(0))
    assert [each.to_local().numel() for each in training.model.parameters() if each.dim() > 0] == [
        len(part) for part in parts
    ]


def keeps_its_bytes_alone(partitions: int) -> None:
    """Of parameters, gradients and Adam's state of its stage within 5 % of what the degree leaves."""
    shutdown()
    degree = dist.get_world_size() // partitions
    sharding = {"sharded_data_parallel_degree": degree, "partitions": partitions, "ddp": True}
    smp.init(sharding | BY_BLOCK)
    layers = [each for _ in range(4) for each in (nn.Linear(60, 60), nn.Tanh())]
    model = smp.DistributedModel(nn.Sequential(*layers))
    optimizer = smp.DistributedOptimizer(adam(model.parameters()))
    smp.step(lambda x: model.backward(model(x).sum()))(torch.ones(4, 60))
    optimizer.step()
    parameters = list(model.local_parameters())
    state = [each for entries in optimizer.state.values() for each in entries.values() if each.dim() > 0]
    parts = [getattr(each, "_local_tensor", each) for each in [*parameters, *(p.grad for p in parameters)]]
    whole = sum(each.ds_numel for each in parameters) * 4
    assert whole >= 4 * 2 * 60 * 60
    for own, kinds in ((parts, 2), (state, 2)):
        assert sum(each.nbytes for each in own) <= 1.05 * kinds * whole / degree


def goes_on_after_an_error() -> None:
    expected = in_one_process()["losses"]
    training = Training(**BY_BLOCK)
    losses = [training.train(0)]

    @smp.step
    def fails(x: Tensor) -> None:
        training.model.backward(loss_of(training.model(x), x))
        raise KeyError("of the script's")

    with pytest.raises(KeyError):
        fails(batch(9))
    losses += [training.train(number) for number in range(1, STEPS)]
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-7)


def refusals() -> None:
    for settings, text in (
        ({"sharded_data_parallel_degree": 2}, "sharded_data_parallel_degree needs ddp=True"),
        ({"sharded_data_parallel_degree": 3, "ddp": True}, "does not divide the number of replicas, 2"),
        (
            {"sharded_data_parallel_degree": 2, "shard_optimizer_state": True, "ddp": True},
            "shard_optimizer_state and sharded_data_parallel_degree both",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            smp.init(settings)
    training = Training()
    with pytest.raises(SMPError, match="sharded_data_parallel_degree"):
        smp.amp.GradScaler("cpu")
    with pytest.raises(SMPUnsupportedError, match="sharded_data_parallel_degree"), training.model.join():
        pass
    with pytest.raises(SMPUnsupportedError, match=r"model.cpu\(\) cannot be combined with sharded"):
        training.model.cpu()
    with pytest.raises(SMPUnsupportedError, match="comm hooks"):
        training.model.register_comm_hook(None, print)
    with pytest.raises(ValueError, match="LBFGS works on all parameters"):
        smp.DistributedOptimizer(torch.optim.LBFGS(training.model.parameters()))
    for degree in (0, 1):
        shutdown()
        smp.init({"sharded_data_parallel_degree": degree, "ddp": True})
        assert type(next(smp.DistributedModel(nn.Linear(2, 2)).parameters())) is nn.Parameter


def clips_in_its_step() -> None:
    expected = in_one_process(clip=0.1)
    training = Training(sdp_gradient_clipping=0.1)
    losses = [training.train(number) for number in range(STEPS)]
    torch.testing.assert_close(losses, expected["losses"], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(training.optimizer._global_grad_norm, expected["norms"][-1])


def half_precision(settings: dict[str, Any]) -> list[Any]:
    """Losses, masters and the flat memory of these."""
    training = Training(**AT_ONCE | settings)
    losses = [training.train(number) for number in range(STEPS)]
    state = training.optimizer.state_dict()
    if settings.get("degree") != 1:
        flat = training.optimizer.fp32_partitioned_groups_flat[0]
        numels = [each.ds_tensor.ds_numel for each in training.optimizer.fp16_groups[0]]
        assert flat.numel() == sum(numels) and flat.dtype is torch.float32
        before = flat.clone()
        training.train(9)
        assert not torch.equal(flat, before)
    return [losses, state]


def trains_in_16_bits(key: str) -> None:
    """As replicas that share out nothing do, to the rounding of their reductions."""
    shutdown()
    plain = half_precision({key: True, "degree": 1})
    sharded = half_precision({key: True, **BY_BLOCK})
    torch.testing.assert_close(sharded[0], plain[0], rtol=2e-2, atol=1e-2)
    masters = [entries["master_weight"] for entries in sharded[1]["state"].values()]
    assert {each.dtype for each in masters} == {torch.float32}
    for own, other in zip(masters, plain[1]["state"].values(), strict=True):
        torch.testing.assert_close(own, other["master_weight"], rtol=0.1, atol=0.05)


def goes_with_tensor_parallelism(partitions: int) -> None:
    plain = of_tensor_parallel_ranks(partitions, 1)
    sharded = of_tensor_parallel_ranks(partitions, 2)
    assert sharded.pop("cut") > plain.pop("cut") == 0
    torch.testing.assert_close(sharded, plain, rtol=1e-5, atol=1e-6)


def of_tensor_parallel_ranks(partitions: int, degree: int) -> dict[str, Any]:
    """Losses, norms and state of a model whose linears two ranks share, and two replicas besides."""
    shutdown()
    degrees = {"partitions": partitions, "tensor_parallel_degree": 2, "prescaled_batch": True, "ddp": True}
    smp.init(degrees | {"sharded_data_parallel_degree": degree, "delayed_parameter_initialization": True})
    torch.manual_seed(0)
    with smp.model_creation(tensor_parallelism=True):
        net = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())])
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(adam(model.parameters()))

    @smp.step
    def step(x: Tensor) -> Tensor:
        loss = (model(x) - 1).square().mean()
        model.backward(loss)
        return loss

    def train(number: int = 9) -> Tensor:
        optimizer.zero_grad()
        torch.manual_seed(10 * number + smp.rdp_rank())
        loss: Tensor = step(torch.randn(ROWS, 64)).reduce_mean()
        norms.append(optimizer.clip_master_grads(0.5))
        optimizer.step()
        return loss

    norms: list[float] = []
    losses = [float(train(number)) for number in range(3)]
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    more = [float(train()) for _ in range(2)]
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert [float(train()) for _ in range(2)] == more
    cut = sum(is_cut(parameter) for parameter in model.parameters())
    state = optimizer.state_dict()["state"]
    return {"losses": losses, "norms": norms, "model": model.state_dict(), "optimizer": state, "cut": cut}


def as_scripts_read_it(folder: Path) -> None:
    """A file at a time, by torch alone, as converters of sharded checkpoints do."""
    for half in ({}, {"bf16": True}, {"fp16": True}):
        training = Training(**BY_BLOCK, **half)
        training.train(0)
        expected = training.model.state_dict()
        for blocking in (True, False):
            save = smp.save_checkpoint(
                str(folder), "one", model=training.model, optimizer=training.optimizer, blocking=blocking
            )
            if save is not None:
                save.wait()
            model = torch.load(folder / "one_partial" / "model_0.pt")["module"]
            torch.testing.assert_close(model, dict(expected), rtol=0.0, atol=0.0)
            assert model.keys() == expected.keys()
            state = torch.load(folder / "one_partial" / "optimizer_0.pt")
            shapes = torch.load(folder / "one_partial" / "user_content.pt")["param_shapes"]
            assert state["partition_count"] == len(list((folder / "one_partial").glob("optimizer_*.pt"))) == 1
            flat, first = torch.cat(state["fp32_flat_groups"]), 0
            assert flat.dtype == torch.float32
            for name, shape in shapes.items():
                count = math.prod(shape)
                found = flat[first : first + count].view(shape)
                first += count
                torch.testing.assert_close(found.to(expected[name].dtype), expected[name], rtol=0.0, atol=0.0)
            assert first == len(flat)
            smp.resume_from_checkpoint(str(folder), "one")
            torch.testing.assert_close(dict(training.model.state_dict()), dict(expected), rtol=0.0, atol=0.0)
            smp.save_checkpoint(str(folder), "alone", optimizer=training.optimizer)
            alone = torch.load(folder / "alone_partial" / "optimizer_0.pt")["fp32_flat_groups"]
            assert torch.equal(torch.cat(alone), flat)


def test_files_have_what_scripts_look_up_in_sharded_checkpoints(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    pool(2).run(as_scripts_read_it, tmp_path)


def saves_and_goes_on_anywhere(folder: Path) -> None:
    expected = in_one_process()["losses"]
    training = Training(**BY_BLOCK)
    first = training.train(0)
    whole = copy.deepcopy(training.optimizer.state_dict())
    parts = copy.deepcopy(training.optimizer.local_state_dict(gather_if_shard=False))
    own = {name: each.clone() for name, each in training.model.state_dict().items()}
    content = {"step": 1}
    smp.save_checkpoint(str(folder), "one", True, training.model, training.optimizer, content)
    smp.save_checkpoint(str(folder), "full", partial=False, model=training.model)
    rest = [training.train(number) for number in range(1, STEPS)]
    torch.testing.assert_close([first, *rest], expected, rtol=1e-6, atol=1e-7)
    for partitions, degree, partial in ((2, 1, True), (1, 1, False), (1, 2, True)):
        again = Training(partitions, degree, **AT_ONCE if degree > 1 else {})
        content = smp.resume_from_checkpoint(str(folder), "one" if partial else "full", partial=partial)
        if partial:
            assert content["step"] == 1
            assert content["param_shapes"]["embedding.weight"] == (WIDTH, WIDTH)
            assert content["buffer_names"] == ["offset"]
        else:
            again.optimizer.load_state_dict(copy.deepcopy(whole))
        losses = [again.train(number) for number in range(1, STEPS)]
        torch.testing.assert_close(losses, expected[1:], rtol=1e-5, atol=1e-6)
    full = get_full_state_dict_from_sharded_data_parallel_checkpoint(str(folder), tag="one")
    torch.testing.assert_close(dict(full), own, rtol=0, atol=0)
    again = Training(**BY_BLOCK)
    again.model.load_state_dict(own)
    again.optimizer.load_state_dict(parts)
    assert [again.train(number) for number in range(1, STEPS)] == rest
    with pytest.raises(SMPCheckpointError, match="part 1 of 3"):
        again.optimizer.load_state_dict(parts | {"_smp_shard": (1, 3)})


class Quantized(nn.Module):
    """Multiplies with a frozen weight of whole numbers that has its scale beside it."""

    def __init__(self) -> None:
        super().__init__()
        numbers = 3 * torch.eye(WIDTH, dtype=torch.int8)
        self.weight = nn.Parameter(numbers, requires_grad=False)
        self.weight.scale = 0.5  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x @ (self.weight * self.weight.scale)  # type: ignore[attr-defined]
        return out


def trains_sparse_rows() -> None:
    """What stays whole may have sparse gradients, and what is cut may have state from the beginning."""

    def make(*, sparse: bool) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(WIDTH, 6, sparse=sparse), nn.Linear(6, WIDTH), Quantized())

    shutdown()
    smp.init({"sharded_data_parallel_degree": 2, "ddp": True, **AT_ONCE})
    model, plain = smp.DistributedModel(make(sparse=True)), make(sparse=False)
    optimizer = smp.DistributedOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
    wanted = torch.optim.Adagrad(plain.parameters(), lr=0.1)

    step = step_of(model)
    for number in range(2):
        x = batch(number)
        optimizer.zero_grad()
        step(x.chunk(2)[smp.dp_rank()])
        norm = optimizer.clip_master_grads(0.1)
        optimizer.step()
        wanted.zero_grad()
        torch.autograd.backward(loss_of(plain(x), x))
        assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(plain.parameters(), 0.1)), rel=1e-5)
        assert optimizer._global_grad_norm == norm
        wanted.step()
    torch.testing.assert_close(model.state_dict(), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)


def trains_what_stays_whole() -> None:
    """An embedding that shortens rows writes into its weight, and hooks wait for whole gradients."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Embedding(WIDTH, 6, max_norm=0.5), nn.Linear(6, WIDTH))
        made[1].bias.register_hook(lambda gradient: gradient * 2)
        return made

    shutdown()
    smp.init({"sharded_data_parallel_degree": 2, "ddp": True, **AT_ONCE})
    model, plain = smp.DistributedModel(make()), make()
    embedding, linear = model.get_module()
    assert [is_cut(each) for each in (embedding.weight, linear.weight, linear.bias)] == [False, True, False]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    wanted = torch.optim.SGD(plain.parameters(), lr=1.0)

    step = step_of(model)
    for number in range(3):
        x = batch(number)  # the same on both, so that they shorten the same rows
        optimizer.zero_grad()
        step(x)
        optimizer.step()
        wanted.zero_grad()
        torch.autograd.backward(loss_of(plain(x), x))
        wanted.step()
    torch.testing.assert_close(model.state_dict(), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)
    hook = linear.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(SMPUnsupportedError, match=r"would not run, because .* register_hook before"):
        step(x)
    hook.remove()
    step(x)


def goes_on_where_weights_lie_otherwise(settings: dict[str, Any]) -> None:
    """Fused optimizers go through memory, and parts of a weight lie otherwise than the whole."""

    def started() -> tuple[Any, Any, Callable[[int], float]]:
        shutdown()
        smp.init({"partitions": 2, "ddp": True, **settings})
        torch.manual_seed(0)
        convolutions = [nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last) for _ in range(4)]
        model = smp.DistributedModel(nn.Sequential(*convolutions))
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01, fused=True))

        @smp.step
        def step(x: Tensor) -> Tensor:
            loss = (model(x) - 1).square().mean()
            model.backward(loss)
            return loss

        def train(number: int) -> float:
            optimizer.zero_grad()
            x = torch.randn(4, 4, 5, 5, generator=torch.Generator().manual_seed(number))
            loss: float = step(x.chunk(smp.dp_size())[smp.dp_rank()]).reduce_mean().item()
            optimizer.step()
            return loss

        return model, optimizer, train

    model, optimizer, train = started()
    train(0), train(1)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for entries in saved[1]["state"].values():
        averages = [each for each in entries.values() if each.dim() == 4]
        assert all(each.is_contiguous(memory_format=torch.channels_last) for each in averages)
    wanted = train(2), train(3)
    model, optimizer, train = started()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert (train(2), train(3)) == pytest.approx(wanted, rel=1e-6)


class ReadsWeights(nn.Module):
    """Computes with its layers' weights between their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) @ self.last.weight + self.first.bias


def reads_weights_between_calls() -> None:
    shutdown()
    by_hand = {"auto_partition": False, "default_partition": 0}
    smp.init({"partitions": 2, "sharded_data_parallel_degree": 2, "ddp": True, **AT_ONCE, **by_hand})
    torch.manual_seed(0)
    net = ReadsWeights()
    plain = copy.deepcopy(net)
    model = smp.DistributedModel(net)
    smp.set_partition(net.last, 1)
    train = smp.step(lambda x: model.backward(model(x).square().mean()))
    for own, work in ((model, train), (plain, lambda x: plain(x).square().mean().backward())):
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        if own is model:
            optimizer = smp.DistributedOptimizer(optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            work(torch.ones(2, WIDTH))
            optimizer.step()
    assert set(smp.allgather(len(list(model.local_parameters())), smp.PP_GROUP)) == {2}
    for name, wanted in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], wanted)


def calls_parts_alone(settings: dict[str, Any]) -> None:
    """A step that never calls the whole model, as of a generator and its discriminator in turn."""
    shutdown()
    smp.init({"sharded_data_parallel_degree": 2, "ddp": True, **settings})
    torch.manual_seed(0)
    parts = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)])
    plain = copy.deepcopy(parts)
    model = smp.DistributedModel(parts, find_unused_parameters=True)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    wanted = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in (0, 1, 0):
        optimizer.zero_grad()
        wanted.zero_grad()
        smp.step(lambda x, part: model.backward(parts[part](x).square().mean()))(torch.ones(2, WIDTH), number)
        torch.autograd.backward(plain[number](torch.ones(2, WIDTH)).square().mean())
        optimizer.step()
        wanted.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_a_step_may_call_parts_of_a_sharded_model_alone(pool: Pools) -> None:
    for settings in (BY_BLOCK, AT_ONCE):
        pool(2).run(calls_parts_alone, settings)


def test_parameters_of_a_split_model_are_read_outside_of_their_modules(pool: Pools) -> None:
    pool(4).run(reads_weights_between_calls)


def test_state_of_weights_that_lie_otherwise_in_memory_is_sharded_as_they_are(pool: Pools) -> None:
    for sharding in ({"sharded_data_parallel_degree": 2, **BY_BLOCK}, {"shard_optimizer_state": True}):
        pool(4).run(goes_on_where_weights_lie_otherwise, sharding)


def test_sparse_gradients_and_early_state_go_with_sharded_parameters(pool: Pools) -> None:
    pool(2).run(trains_sparse_rows)
    pool(2).run(trains_what_stays_whole)


def test_sharded_parameters_go_with_what_else_saves_memory(pool: Pools) -> None:
    for settings in (
        BY_BLOCK | {"delayed_parameter_initialization": True, "checkpointed": True},
        AT_ONCE | {"offload_activations": True, "checkpointed": True, "microbatches": 2},
    ):
        pool(2).run(trains_as_one_process, 1, None, settings)
    pool(4).run(
        trains_as_one_process,
        2,
        None,
        AT_ONCE | {"delayed_parameter_initialization": True, "microbatches": 2},
    )


def test_parameters_that_tensor_parallel_ranks_share_are_sharded_over_replicas(pool: Pools) -> None:
    pool(4).run(goes_with_tensor_parallelism, 1)


def test_a_sharded_model_is_saved_and_goes_on_at_any_degree(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(saves_and_goes_on_anywhere, tmp_path)


def test_a_sharded_model_trains_as_in_one_process(pool: Pools) -> None:
    for settings in (BY_BLOCK, AT_ONCE, BY_BLOCK | {"microbatches": 2}, AT_ONCE | {"microbatches": 2}):
        pool(2).run(trains_as_one_process, 1, None, settings)
    pool(4).run(trains_as_one_process, 1, 2, BY_BLOCK)  # two copies of two parts each
    pool(2).run(trains_as_one_process, 1, None, BY_BLOCK, True)
    pool(2).run(clips_in_its_step)


def test_a_split_model_shares_out_the_parameters_of_its_stages(pool: Pools) -> None:
    for settings, evaluated in ((AT_ONCE, True), (AT_ONCE | {"microbatches": 4}, False)):
        pool(4).run(trains_as_one_process, 2, None, settings, evaluated)


def test_a_rank_keeps_its_part_of_parameters_and_state_alone(pool: Pools) -> None:
    pool(2).run(keeps_its_part_alone)
    for ranks, partitions in ((2, 1), (4, 1), (4, 2)):
        pool(ranks).run(keeps_its_bytes_alone, partitions)


def test_sharded_parameters_train_on_after_a_step_that_failed(pool: Pools) -> None:
    pool(2).run(goes_on_after_an_error)


def test_what_cannot_go_with_sharded_parameters_is_refused(pool: Pools) -> None:
    pool(2).run(refusals)


@pytest.mark.parametrize("key", ["bf16", "fp16"])
def test_sharded_parameters_of_16_bits_have_masters_of_their_parts(pool: Pools, key: str) -> None:
    pool(2).run(trains_in_16_bits, key)
