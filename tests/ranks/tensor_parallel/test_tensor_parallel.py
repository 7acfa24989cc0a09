"""Models with distributed modules train as the plain ones, alone and in pipelines, and after loading."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPError, SMPUnsupportedError
from opensmd.modelparallel.replicas.reducer import Replicas
from opensmd.modelparallel.replicas.together import ReplicasTogether
from tests.support.partitioned import restart
from tests.support.ranks import RankPool
from tests.support.tensor_parallel import plain_training, require_equal, shared_training

Pools = Callable[[int], RankPool]
WORDS, VOCABULARY, WIDTH = 6, 33, 8


class Net(nn.Module):
    """Supported modules, some that are not, and one whose size cannot be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, 5, bias=False)
        self.odd = nn.Linear(5, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(self.embedding(ids))))
        logits: Tensor = self.odd(self.second(hidden))
        return logits


def make_net() -> nn.Module:
    torch.manual_seed(11)
    return Net()


def net_loss(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())


def train_net(tensor: int, stages: int, microbatches: int, prescaled: bool) -> None:
    config = {
        "tensor_parallel_degree": tensor,
        "partitions": stages,
        "microbatches": microbatches,
        "prescaled_batch": prescaled,
    }
    wanted = plain_training(make_net(), net_loss, WORDS, VOCABULARY)
    found, model = shared_training(make_net, net_loss, WORDS, VOCABULARY, config=config)
    require_equal(found, wanted)
    kinds = {type(submodule).__name__ for submodule in model.distributed_modules()}
    assert kinds == {"DistributedEmbedding", "DistributedLinear"}
    module = model.get_module()
    assert type(module.odd) is nn.Linear  # 5 is not divided by 2
    assert model.is_distributed_parameter(module.first.weight) or not model.is_local("first.weight")
    assert not model.is_distributed_parameter(module.first.bias)
    assert not model.is_scaled_batch_parameter(module.norm.weight)
    assert smp.utils.get_distribution_axis(module.first.weight) == 1
    for number, name in enumerate(wanted.state):
        for key, value in wanted.optimizer["state"][number].items():
            mine = found.optimizer["state"][number][key]
            torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-7, msg=f"{key} of {name}")


NET_SETUPS: list[Any] = [
    (2, 2, 1, 1, False),
    (2, 2, 1, 2, True),
    pytest.param(4, 2, 2, 2, False, marks=pytest.mark.newest),
    (4, 2, 2, 1, True),
    (4, 2, 1, 2, False),
]


@pytest.mark.parametrize(("size", "tensor", "stages", "microbatches", "prescaled"), NET_SETUPS)
def test_distributed_modules_of_torch_train_like_the_plain_ones(
    pool: Pools, size: int, tensor: int, stages: int, microbatches: int, prescaled: bool
) -> None:
    pool(size).run(train_net, tensor, stages, microbatches, prescaled)


def make_compiled() -> nn.Module:
    net = make_net()
    net.compile(backend="eager")
    return net


def train_compiled() -> None:
    wanted = plain_training(make_net(), net_loss, WORDS, VOCABULARY)
    config = {"tensor_parallel_degree": 2, "microbatches": 2}
    common = {**config, "prescaled_batch": True}
    found, _ = shared_training(make_compiled, net_loss, WORDS, VOCABULARY, config=common)
    require_equal(found, wanted)
    with pytest.raises(ValueError, match=r"module '' is compiled .* Use prescaled_batch=True"):
        shared_training(make_compiled, net_loss, WORDS, VOCABULARY, config=config)


def test_a_compiled_module_may_have_distributed_ones_inside_if_the_batch_is_common(pool: Pools) -> None:
    pool(2).run(train_compiled)


def distributed_in_16_bits(delayed: bool) -> None:
    config = {"tensor_parallel_degree": 2, "prescaled_batch": True, "ddp": True, "fp16_params": True}
    restart(**config, delayed_parameter_initialization=delayed)
    torch.manual_seed(11)
    with smp.model_creation(tensor_parallelism=True):
        net = nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Linear(64, 64), nn.LayerNorm(64).half())
        net.append(nn.Linear(64, 3))  # 3 is not divided by 2, but 64 inputs are
        net.append(nn.Linear(3, 3))
    model = smp.DistributedModel(net)
    torch.manual_seed(11)
    plain = [nn.Embedding(VOCABULARY, 64), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 3)]
    smp.step(lambda ids: model.get_module()[:4](ids))(torch.ones(2, 3, dtype=torch.long))
    state = model.state_dict()
    for number in (0, 1, 3):
        assert state[f"{number}.weight"].dtype is torch.float16
        torch.testing.assert_close(state[f"{number}.weight"], plain[number].weight.half(), rtol=0.0, atol=0.0)
    assert state["4.weight"].dtype is torch.float32


def test_distributed_modules_alone_are_of_16_bits_if_asked(pool: Pools) -> None:
    for delayed in (False, True):
        pool(2).run(distributed_in_16_bits, delayed)


class Halves(smp.nn.DistributedModule):
    """A distributed counterpart of a script's own: each rank has some outputs, and they are put together."""

    def __init__(self, outputs: int, inputs: int, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.scale = scale
        self.split_parameter("weight", torch.randn(outputs, inputs), 1)

    def forward(self, input: Tensor) -> Tensor:
        whole = self.gather_batch(input)
        output = F.linear(smp.nn.utils.own_slice(whole, -1), self.weight) * self.scale
        return self.scatter_batch(smp.nn.utils.from_partial(output))


class Whole(nn.Module):
    """What scripts write."""

    def __init__(self, inputs: int, *, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.weight = nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, input: Tensor, *, negative: bool = False) -> Tensor:
        output = F.linear(input, self.weight)
        return -output if negative else output


def register_hooks() -> None:
    restart(tensor_parallel_degree=2, ddp=True, prescaled_batch=True)
    seen: list[Any] = []

    def at_init(inputs: int, *, outputs: int) -> Any:
        return None if outputs == 3 else ((outputs,), {"inputs": inputs})

    def at_call(input: Tensor, *, negative: bool = False) -> Any:
        seen.append(negative)
        return (input,), {}

    def at_return(output: Tensor) -> Tensor:
        return -output if seen[-1] else output

    decorated = smp.tp_register(Halves, at_init, at_call, at_return)(type("Own", (Whole,), {}))
    smp.tp_register_with_module(Whole, Halves, init_hook=at_init)
    with smp.tensor_parallelism(scale=2.0, fused_softmax=True):
        module = nn.ModuleList([decorated(4, outputs=2), Whole(4, outputs=2), Whole(4, outputs=3)])
        with smp.tensor_parallelism(enabled=False):
            module.append(Whole(4, outputs=2))
    module.append(Whole(4, outputs=2))
    smp.set_tensor_parallelism(module[4])
    plain = Whole(4, outputs=2)
    model = smp.DistributedModel(module)
    kinds = [type(one).__name__ for one in model.get_module()]
    assert kinds == ["Halves", "Halves", "Whole", "Whole", "Halves"]
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    first, second, _, _, last = model.get_module()
    torch.testing.assert_close(first(x, negative=True), -2 * plain(x))
    torch.testing.assert_close(second(x), 2 * plain(x))
    torch.testing.assert_close(last(x), plain(x))
    assert first.weight.shape == (2, 2)
    with pytest.raises(ValueError, match="has distributed the model already"):
        smp.set_tensor_parallelism(plain)
    with pytest.raises(TypeError, match="expected a class"):
        smp.tp_register(plain)(Whole)


def test_modules_of_a_script_are_distributed_through_its_hooks(pool: Pools) -> None:
    pool(2).run(register_hooks)


def random_numbers() -> None:
    restart(tensor_parallel_degree=2, ddp=True)
    torch.manual_seed(smp.rank())
    with smp.random.common():
        common = torch.rand(4)
    with smp.random.per_tensor_rank():
        own = torch.rand(4)
    assert len({tuple(one.tolist()) for one in smp.allgather(common, smp.TP_GROUP)}) == 1
    assert len({tuple(one.tolist()) for one in smp.allgather(own, smp.TP_GROUP)}) == 2
    smp.random.manual_seed(5)
    assert len(set(smp.allgather(torch.rand(()).item(), smp.TP_GROUP))) == 1


def checkpointed_dropout() -> None:
    """What is computed once more in backward leaves out what was left out before."""
    restart(tensor_parallel_degree=2, ddp=True, prescaled_batch=True)
    torch.manual_seed(3)
    layer = smp.nn.DistributedTransformerLayer(
        4, 2, 8, 16, attention_dropout_prob=0.5, hidden_dropout_prob=0.5, causal_mask_size=8
    )
    x = torch.randn(2, 5, 8, requires_grad=True)
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(9)
        if checkpointed:
            output = torch.utils.checkpoint.checkpoint(layer, (x, None), use_reentrant=False)[0]
        else:
            output = layer((x, None))[0]
        (gradient,) = torch.autograd.grad(output.square().sum(), x)
        gradients.append(gradient)
        outputs = smp.allgather(output.detach(), smp.TP_GROUP)
        assert outputs[0].equal(outputs[1])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_what_ranks_share_is_dropped_alike_and_what_is_split_is_not(pool: Pools) -> None:
    pool(2).run(random_numbers)
    pool(2).run(checkpointed_dropout)


def dropout_before_shared_modules(stages: int) -> None:
    """Ranks with seeds of their own drop the same of a common batch: else what they share would part."""
    restart(tensor_parallel_degree=2, partitions=stages, ddp=True, prescaled_batch=True)
    with smp.tensor_parallelism():
        module = nn.Sequential(nn.Dropout(), nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 4))
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(smp.rank())
    random.seed(smp.rank())

    @smp.step
    def step_function(x: Tensor) -> tuple[Tensor, Tensor]:
        factor = torch.rand(()) * random.random() * numpy.random.random()
        output = model(x * factor)
        model.backward(output.square().mean())
        return output, factor

    results: list[Tensor] = []
    for _ in range(2):
        results.extend(each.concat() for each in step_function(torch.ones(4, 8)))
        optimizer.step()
    drawn = torch.tensor([random.random(), numpy.random.random()])
    biases = [each.detach() for name, each in model.local_named_parameters() if "bias" in name]
    assert stages * len(biases) == 2
    for one in (*results, *biases, torch.rand(3), drawn):
        mine, other = smp.allgather(one, smp.TP_GROUP)
        assert mine.equal(other)


def test_modules_that_are_not_shared_draw_alike_where_the_batch_is_common(pool: Pools) -> None:
    pool(2).run(dropout_before_shared_modules, 1)
    pool(4).run(dropout_before_shared_modules, 2)


def double(_: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def checkpointed(linear: nn.Linear) -> None:
    smp.set_activation_checkpointing(linear)


# How scripts change a module; its counterpart would know nothing of it.
CHANGES: list[Callable[[nn.Linear], Any]] = [
    lambda linear: linear.register_forward_hook(double),
    lambda linear: linear.weight.register_hook(lambda gradient: 2 * gradient),
    checkpointed,
    nn.utils.weight_norm,
    nn.utils.spectral_norm,
    nn.utils.parametrizations.weight_norm,
]


class BaseTunerLayer(nn.Module):
    """Takes the place of PEFT's, which is known by this name."""

    __module__ = "peft.tuners.tuners_utils"

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base_layer.weight * 2)


def changed_modules() -> None:
    restart(tensor_parallel_degree=2, ddp=True, prescaled_batch=True)
    with smp.tensor_parallelism():
        module = nn.ModuleList([*[nn.Linear(4, 4) for _ in CHANGES], BaseTunerLayer(), nn.Linear(4, 4)])
    for change, linear in zip(CHANGES, module, strict=False):
        change(linear)
    x = torch.ones(2, 4)
    wanted = [linear.eval()(x) for linear in module]
    shared = smp.DistributedModel(module).get_module()
    distributed = [isinstance(each, smp.nn.DistributedLinear) for each in shared]
    assert distributed == [*[False] * len(CHANGES), False, True]
    for found, value in zip(shared, wanted, strict=True):
        torch.testing.assert_close(found(x), value)


def test_modules_that_a_script_has_changed_stay_as_they_are(pool: Pools) -> None:
    pool(2).run(changed_modules)


def torchs_encoder() -> None:
    """In evaluation torch's fused kernel would take slices for whole weights."""
    restart(tensor_parallel_degree=2, ddp=True, prescaled_batch=True)

    def make() -> nn.Module:
        torch.manual_seed(2)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2).eval()

    with smp.tensor_parallelism():
        module = make()
    model, plain = smp.DistributedModel(module), make()
    assert isinstance(module.layers[0].linear1, smp.nn.DistributedLinear)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    padding = torch.tensor([[False, False, True], [False, False, False]])
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
        seen = ~padding
        found, wanted = (each(x, src_key_padding_mask=padding)[seen] for each in (model, plain))
        torch.testing.assert_close(found, wanted)


@pytest.mark.newest
def test_an_encoder_of_torchs_with_shared_layers_is_evaluated(pool: Pools) -> None:
    pool(2).run(torchs_encoder)


def misuse() -> None:
    restart(tensor_parallel_degree=2, ddp=True, prescaled_batch=True)
    with smp.tensor_parallelism():
        model = smp.DistributedModel(nn.Linear(4, 2))
    forward = smp.step(lambda x: model(x).sum())
    same = forward(torch.ones(2, 4)).concat()
    assert smp.allgather(same.item(), smp.TP_GROUP) == [same.item()] * 2
    with pytest.raises(SMPError, match=r"different data. With prescaled_batch=True .* smp.rdp_rank"):
        forward(torch.full((2, 4), float(smp.rank())))
    with pytest.raises(RuntimeError, match="ranks of a tensor-parallel group compute each step together"):
        ReplicasTogether([Replicas.__new__(Replicas)] * 2).join()
    assert model(torch.ones(2, 4)).shape == (2, 2)  # in one partition, outside steps, too


def not_over_these_replicas() -> None:
    restart(tensor_parallel_degree=2, ddp=True, prescaled_batch=True)
    with smp.tensor_parallelism():
        module = nn.ModuleList([nn.Embedding(3, 4, sparse=True), nn.Linear(4, 2)])
    with pytest.raises(ValueError, match="sparse gradients of slices cannot be averaged over replicas"):
        smp.nn.DistributedEmbedding(3, 4, sparse=True)
    model = smp.DistributedModel(module)
    assert [type(each) for each in module] == [nn.Embedding, smp.nn.DistributedLinear]
    forward = smp.step(lambda x: model.get_module()[1](x).sum())
    with pytest.raises(SMPUnsupportedError, match="a hook is not told which it has"):
        ReplicasTogether([Replicas.__new__(Replicas)] * 2).register_comm_hook(None, print)
    model.register_comm_hook(None, print)
    with pytest.raises(SMPUnsupportedError, match="comm hooks cannot be combined with distributed modules"):
        forward(torch.ones(2, 4))


def test_what_replicas_of_slices_cannot_average_is_refused(pool: Pools) -> None:
    pool(4).run(not_over_these_replicas)


def test_batches_that_should_be_the_same_and_are_not_are_refused(pool: Pools) -> None:
    pool(2).run(misuse)
