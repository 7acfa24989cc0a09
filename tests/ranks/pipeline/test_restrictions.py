"""What pipelines cannot do says so, with the reason and a way out, on the ranks that see it."""

from __future__ import annotations

import copy
import functools
import itertools
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import get_total_norm

import smdistributed.modelparallel.torch as smp
from tests.ranks.models.case import CLASSES, WIDTH, Layers, classify
from tests.support.equality import Pools
from tests.support.ranks import ROOT
from tests.support.timeouts import expire_after

PAGE = ROOT / "docs" / "restrictions.md"
Step = Callable[[Any, Tensor, Tensor], Tensor]


class Chain(Layers):
    """Two layers on the first stage, two on the second."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.between(torch.tanh(self.second(torch.tanh(self.first(x)))))
        out: Tensor = self.head(self.third(h))
        return out

    def between(self, h: Tensor) -> Tensor:
        """What happens between the stages."""
        return h


def trained(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


class Mapped(Chain):
    def between(self, h: Tensor) -> Tensor:
        out: Tensor = torch.vmap(lambda row: row / row.norm())(h)
        return out


class Transformed(Chain):
    def between(self, h: Tensor) -> Tensor:
        out: Tensor = torch.func.grad(lambda x: (x * h).sum())(torch.ones_like(h))
        return out


class Copied(Chain):
    def between(self, h: Tensor) -> Tensor:
        return copy.deepcopy(h.detach()) + h


class Addressed(Chain):
    def between(self, h: Tensor) -> Tensor:
        return h * (1.0 if h.data_ptr() else 0.0)


class Differentiated(Chain):
    def between(self, h: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(h.sum(), [self.first.weight], create_graph=True)
        return h + gradient.sum()


def with_backward_hook() -> nn.Module:
    model = Chain()
    model.register_full_backward_hook(lambda module, into, out: None)
    return model


class Slow(nn.Linear):
    """Takes so long that on the other rank the next microbatch has its turn meanwhile."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        return super().forward(x)


class ComingBack(Chain):
    """Its data goes to the second stage and back."""

    def __init__(self) -> None:
        super().__init__()
        self.third = Slow(WIDTH, WIDTH)


@functools.cache
def kept() -> dict[str, Tensor]:
    """A dict that only the cache of a function has."""
    return {}


class Keeping(ComingBack):
    """Keeps a tensor in a dict of the script's, and uses it after the data has been on the other stage."""

    def forward(self, x: Tensor) -> Tensor:
        first = kept()["first"] = torch.tanh(self.first(x))
        out: Tensor = self.head(self.third(self.second(self.third(first))) + kept()["first"])
        return out


class Accumulating(ComingBack):
    """Adds to what earlier microbatches have left, before and after the data has been on the other stage."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        self.total = self.total + h.detach().mean()
        h = self.second(self.third(h))
        self.total = self.total + h.detach().mean()
        out: Tensor = self.head(self.third(h) + self.total)
        return out


CALLS = itertools.count()


class Switching(nn.Module):
    """Returns something else every other time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if next(CALLS) % 2 else torch.cat([y, y])


class Unsteady(Chain):
    """A module on the second stage whose result's shape is not a matter of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.third = Switching()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.third(torch.tanh(self.first(x)))[: len(x)])
        return out


class Opaque(nn.Module):
    """Returns an object that cannot be pickled."""

    def forward(self, x: Tensor) -> Any:
        return lambda: x


class Hidden(Chain):
    """A function as a module's result."""

    def __init__(self) -> None:
        super().__init__()
        self.opaque = Opaque()

    def between(self, h: Tensor) -> Tensor:
        out: Tensor = self.opaque(h)()
        return out


def switched_modes(model: Any, x: Tensor, y: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    return trained(model, x, y)


def second_order(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward(create_graph=True)  # type: ignore[no-untyped-call]
    return loss


def twice_backward(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = trained(model, x, y)
    model.backward(loss)
    return loss


def only_on_one_rank(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = trained(model, x, y)
    if smp.rank() == 0:
        expire_after(4.0)  # the other rank has nothing to send, however late it is
        print(loss.item())
    return loss


def returning_sparse(model: Any, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.relu().to_sparse()


def saving(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = trained(model, x, y)
    model.state_dict()
    return loss


def nested(model: Any, x: Tensor, y: Tensor) -> Tensor:
    smp.step(lambda x: model(x))(x)
    return trained(model, x, y)


class Listened(Chain):
    """A hook inside a module that runs as a whole keeps what the step returns, from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.opaque = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.kept: list[Tensor] = []
        self.listens = False
        self.opaque[0].register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, out: Tensor) -> None:
        if self.listens:
            self.kept.append(out.detach())

    def between(self, h: Tensor) -> Tensor:
        out: Tensor = self.opaque(h)
        return out


def returning_what_was_kept(model: Any, x: Tensor, y: Tensor) -> Any:
    module = model.get_module()
    module.kept.clear()
    loss = trained(model, x, y)
    module.listens = True
    return loss, list(module.kept)


class Appending(nn.Module):
    """Appends to a list of the script's what it could return."""

    def __init__(self, losses: list[Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.append = losses.append

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        self.append(out.square().mean())
        return out


class Collected(Chain):
    """The loss has a term that a module inside another has put into a list."""

    def __init__(self) -> None:
        super().__init__()
        losses: list[Tensor] = []
        self.losses = losses.copy
        self.clear = losses.clear
        self.opaque = nn.Sequential(Appending(losses), nn.ReLU())

    def between(self, h: Tensor) -> Tensor:
        self.clear()
        out: Tensor = self.opaque(h)
        return out + sum(self.losses())


class Sparse(Chain):
    """The second stage multiplies with a sparse matrix that the first one has computed."""

    def between(self, h: Tensor) -> Tensor:
        return h + torch.sparse.mm(h.detach().to_sparse(), self.third(h).T).sum()


class Remembering(nn.Linear):
    """Adds what it finds in an attribute."""

    found: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.found


class Attached(Chain):
    """A module finds in an attribute what a layer of its own stage has computed from the other stage's."""

    def __init__(self) -> None:
        super().__init__()
        self.opaque = Remembering(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.opaque.found = self.third(torch.tanh(self.first(x)))
        out: Tensor = self.head(self.opaque(x))
        return out


class Unpacking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, box: SimpleNamespace) -> Tensor:
        out: Tensor = self.linear(box.content)
        return out


class Averaging(nn.Linear):
    """Keeps a moving average in a buffer that it is given."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return super().forward(x - self.mean)


def with_one_average() -> nn.Module:
    module, mean = Chain(), torch.zeros(WIDTH)
    module.second, module.third = Averaging(mean), Averaging(mean)
    return module


class Adding(nn.Module):
    """Adds what it gets to a tensor that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        total.add_(x.detach().sum(0))
        out: Tensor = self.linear(x) / total
        return out


class Lending(Chain):
    """A module on the second stage is given a buffer of one on the first."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.third = nn.BatchNorm1d(WIDTH), Adding()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(x)))
        out: Tensor = self.head(self.third(h, self.second.running_mean))
        return out


class Boxed(Chain):
    """A module is given an object with a tensor of another stage, as a cache of keys and values is."""

    def __init__(self) -> None:
        super().__init__()
        self.opaque = Unpacking()

    def between(self, h: Tensor) -> Tensor:
        out: Tensor = self.opaque(SimpleNamespace(content=h))
        return out


@dataclass(frozen=True)
class Restriction:
    """A script that cannot work.

    Attributes:
        says: parts of the message of at least one rank.
        model, step: what the script does.
    """

    says: tuple[str, ...]
    model: Callable[[], nn.Module] = Chain
    step: Callable[[Any, Tensor, Tensor], Any] = trained


def frozen_inside(model: Any, x: Tensor, y: Tensor) -> Tensor:
    model.module.third.requires_grad_(requires_grad=False)
    return trained(model, x, y)


IN_MODULE = "Put that code into an nn.Module of its own"
RESTRICTIONS = {
    "torch.vmap between stages": Restriction(("torch.vmap", IN_MODULE), Mapped),
    "torch.func.grad between stages": Restriction(("torch.func.grad or another", IN_MODULE), Transformed),
    "copy.deepcopy of a placed tensor": Restriction(
        ("copy.deepcopy of a tensor", "inside a smp.step function"), Copied
    ),
    "Tensor.data_ptr of a placed tensor": Restriction(("Tensor.data_ptr()", "nn.Module"), Addressed),
    "torch.autograd.grad between stages": Restriction(("torch.autograd.grad", "nn.Module"), Differentiated),
    "create_graph": Restriction(("neither create_graph nor inputs",), step=second_order),
    "full backward hooks on a split module": Restriction(
        ("is run piece by piece over the partitions and has full backward hooks", "tensor.register_hook"),
        with_backward_hook,
    ),
    "eval() inside a step": Restriction(("train() or eval() inside a smp.step",), step=switched_modes),
    "requires_grad of a parameter inside a step": Restriction(
        ("requires_grad of a parameter of shape", "was changed inside a smp.step function"),
        step=frozen_inside,
    ),
    "a tensor that a later microbatch has computed": Restriction(
        ("was given, after module 'third'", "what kept it", "set active_microbatches to 1"), Keeping
    ),
    "an attribute that goes on from microbatch to microbatch": Restriction(
        ("has changed 'total' after a later", "active_microbatches to 1"), Accumulating
    ),
    "a result that does not follow from the arguments": Restriction(
        ("module 'third' returned", "smp.set_partition"), Unsteady
    ),
    "a result that cannot be described": Restriction(
        ("module 'opaque' returned cannot be described",), Hidden
    ),
    "a graph used twice": Restriction(("retain_graph=True",), step=twice_backward),
    "a step inside a step": Restriction(("inside another one",), step=nested),
    "smp.allgather, state dicts and checkpoints inside a step": Restriction(
        ("model.state_dict() was called on rank 0 inside a smp.step function", "call it after the step"),
        step=saving,
    ),
    "what a module leaves in a list of the script": Restriction(
        ("got out of it by another way than its result", "Return it from the module"), Collected
    ),
    "what a hook inside a module carries out": Restriction(
        ("carried a tensor out of module 'opaque'", "Return it from the module", "before the first step"),
        Listened,
        returning_what_was_kept,
    ),
    "a sparse tensor of another partition": Restriction(("sparse tensors do not go from one",), Sparse),
    "a sparse tensor that a step returns": Restriction(
        ("returned a sparse tensor of shape", "Return tensor.to_dense()"), step=returning_sparse
    ),
    "a buffer that modules of several partitions change": Restriction(
        ("has changed a buffer of shape (12,) in place", "on one partition with smp.set_partition"),
        with_one_average,
    ),
    "a buffer of another partition that a module changes": Restriction(
        ("has changed in place a buffer, parameter or gradient of shape", "Change it in the module to which"),
        Lending,
    ),
    "a tensor that a module finds in an attribute": Restriction(
        ("has found a gradient for a tensor of shape", "to the module as an argument"),
        Attached,
    ),
    "a tensor of another partition in an object": Restriction(
        ("module 'opaque' on pipeline rank 1 has found a tensor", "in 'content' of its argument 0"), Boxed
    ),
    "a value asked for on one rank only": Restriction(
        (
            "the pipeline stopped",
            "for the value of torch.Tensor.item from pipeline rank 1",
            "If all ranks run, they have taken different ways through the step function",
        ),
        step=only_on_one_rank,
    ),
}


def told(name: str) -> str:
    """What three steps of a script that cannot work say on this rank."""
    restriction = RESTRICTIONS[name]
    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    torch.manual_seed(0)
    module = restriction.model()
    for part in ("third", "head", "opaque"):
        if hasattr(module, part):
            smp.set_partition(module.get_submodule(part), 1)
    model = smp.DistributedModel(module)
    step = smp.step(restriction.step)
    try:
        for number in range(3):
            step(model, *classify(number, 8))
        smp.barrier()
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        smp.shutdown()
        dist.destroy_process_group()  # there may be messages left in it
    return "nothing"


class Branches(Layers):
    """Both stages use the input."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.first(x)) + self.third(x))
        return out


def gradients_of_inputs() -> list[Tensor]:
    """The gradient of the step's input, as this rank has it and as plain PyTorch has it."""
    smp.shutdown()
    smp.init({"partitions": 2, "auto_partition": False, "default_partition": 0})
    torch.manual_seed(0)
    module = Branches()
    x, y = classify(0, 8)
    x.requires_grad_()
    wanted = torch.autograd.grad(F.cross_entropy(module(x), y), x)[0]
    smp.set_partition(module.third, 1)
    smp.set_partition(module.head, 1)
    model = smp.DistributedModel(module)

    @smp.step
    def step(x: Tensor, y: Tensor) -> None:
        model.backward(F.cross_entropy(model(x), y))

    step(x, y)
    norm = torch.nn.utils.clip_grad_norm_(model.local_parameters(), 1e9)
    smp.shutdown()
    assert x.grad is not None
    return [x.grad, wanted, norm]


def test_gradients_of_inputs_and_their_norms_are_those_of_the_ranks_part(pool: Pools) -> None:
    (first, wanted, norm), (second, _, other) = pool(2).run(gradients_of_inputs)
    assert first.any() and second.any() and norm != other
    torch.testing.assert_close(first + second, wanted, rtol=1e-6, atol=1e-7)


OUTSIDE = {
    "the model outside steps": (
        "was called on a parameter whose data is on another pipeline rank",
        "To run the model, call it in a smp.step function",
    ),
    "a parameter that comes after the first step": (
        "parameter 'head.weight' was added to the model after the first step",
        "Change the model before the first step",
    ),
    "the state of an optimizer over local parameters": (
        "the optimizers of the pipeline's ranks have different parameters",
        "Make the optimizer of model.parameters()",
    ),
    "torch.nn.utils.clip_grad_norm_": (
        "torch.nn.utils.clip_grad_norm_ sees the gradients of this rank alone",
        "Call optimizer.clip_master_grads(max_norm)",
    ),
    "torch.nn.utils.get_total_norm": (
        "torch.nn.utils.get_total_norm sees the gradients of this rank alone",
        "Call optimizer.clip_master_grads(max_norm)",
    ),
}


def norm_of(parameters: Iterable[nn.Parameter]) -> Tensor:
    return get_total_norm([each.grad for each in parameters if each.grad is not None])


def used_outside_of_steps() -> tuple[list[str], list[str]]:
    """What running, changing and saving a split model says, and what clipping its gradients warns of."""
    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    module = Chain()
    smp.set_partition(module.third, 1)
    smp.set_partition(module.head, 1)
    head = module.head
    model = smp.DistributedModel(module)
    batch = classify(0, 8)
    smp.step(trained)(model, *batch)
    with pytest.raises(RuntimeError) as raised:
        model.module(batch[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.nn.utils.clip_grad_norm_(model.local_parameters(), 1.0)
        norm_of(model.local_parameters())
        assert all(parameter.grad is None or parameter.grad.any() for parameter in model.parameters())
        assert not caught
        for _ in range(2):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norm_of(model.parameters())
    module.head = nn.Linear(WIDTH, CLASSES)
    with pytest.raises(RuntimeError) as refused:
        smp.step(trained)(model, *batch)
    del module.head
    module.head = head
    smp.step(trained)(model, *batch)
    local = smp.DistributedOptimizer(torch.optim.SGD(model.local_parameters(), lr=0.1, momentum=0.9))
    local.step()
    with pytest.raises(RuntimeError) as unsaved:
        local.state_dict()
    with pytest.raises(RuntimeError) as unsaved_part:
        local.local_state_dict()
    smp.shutdown()
    assert all(warning.filename == __file__ for warning in caught)
    errors = [str(each.value) for each in (raised, refused, unsaved, unsaved_part)]
    return errors, [str(warning.message) for warning in caught]


def test_what_a_split_model_cannot_do_outside_of_steps_says_what_to_do(pool: Pools) -> None:
    *refusals, clipping, norms = OUTSIDE.values()
    refusals.append(refusals[-1])  # of a part, too
    for errors, warned in pool(2).run(used_outside_of_steps):
        for error, says in zip(errors, refusals, strict=True):
            assert all(one in error for one in says)
        for warning, says in zip(warned, (clipping, norms), strict=True):
            assert all(one in warning for one in says)


@pytest.mark.parametrize("name", [*RESTRICTIONS, *OUTSIDE])
def test_the_page_of_restrictions_has_the_message(name: str) -> None:
    sections = [word.partition("\n") for word in PAGE.read_text().split("\n## ")]
    (text,) = [" ".join(body.split()) for title, _, body in sections if title.lower() == name.lower()]
    for say in OUTSIDE[name] if name in OUTSIDE else RESTRICTIONS[name].says:
        assert say in text.replace("> ", "")


@pytest.mark.parametrize("name", RESTRICTIONS)
def test_what_cannot_work_says_why_and_what_to_do(pool: Pools, name: str) -> None:
    texts = pool(2).run(told, name)
    assert "nothing" not in texts
    says = RESTRICTIONS[name].says
    assert any(all(say in text for say in says) for text in texts), "\n---\n".join(texts)
