"""Public calls of smp take what their documentation shows, and refuse the rest with one clear error."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPError, SMPUnsupportedError
from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint_sequential
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


@contextlib.contextmanager
def started(**config: Any) -> Iterator[None]:
    smp.shutdown()
    smp.init({"microbatches": 2, "ddp": True, **config})
    try:
        yield
    finally:
        smp.shutdown()


def settings_of_each_rank() -> None:
    """Ranks that make different groups wait for each other; those with other microbatches, in the step."""
    with pytest.raises(SMPError, match=r"different settings: microbatches=2 on rank 0, and .*=3 on rank 1"):
        smp.init({"partitions": 2, "microbatches": 2 + dist.get_rank()})
    with pytest.raises(SMPError, match=r"pipeline_parallel_degree=1 on rank 0, and .*=2 on rank 1"):
        smp.init({"partitions": 1 + dist.get_rank(), "ddp": True})


def test_all_ranks_learn_that_their_settings_differ(pool: Pools) -> None:
    pool(2).run(settings_of_each_rank)


def rows(replica: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(replica))


def replicas_call_loss_backward() -> None:
    """Its gradients are reduced as model.backward's are, though they are the microbatches' sum."""
    with started():
        model = smp.DistributedModel(net())

        @smp.step
        def train_step(x: Tensor) -> None:
            model(x).square().mean().backward()
            nn.Linear(4, 1)(x).sum().backward()  # none of the model's

        asked = pytest.warns(UserWarning, match="adds up the gradients of the 2 microbatches")
        with asked if smp.rank() == 0 else contextlib.nullcontext():
            train_step(rows(smp.dp_rank()))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train_step(rows(smp.dp_rank()))  # once is enough
        whole = net()
        for replica in range(smp.dp_size()):
            for piece in rows(replica).chunk(2):
                (2 * whole(piece).square().mean() / smp.dp_size()).backward()
        for mine, wanted in zip(model.local_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, wanted.grad)


def test_replicas_reduce_also_the_gradients_of_loss_backward(pool: Pools) -> None:
    pool(2).run(replicas_call_loss_backward)


def uneven_from_the_first_step(partitions: int) -> list[Tensor]:
    with started(partitions=partitions):
        model = smp.DistributedModel(net())
        train_step = smp.step(lambda x: model.backward(model(x).square().mean()))
        with model.join():
            for _ in range(1 + 2 * smp.dp_rank()):
                model.zero_grad()
                train_step(rows(0))
        return [parameter.detach().clone() for parameter in model.local_parameters()]


@pytest.mark.parametrize(("ranks", "partitions"), [(2, 1), (4, 2), (2, 2)])
def test_join_may_surround_the_first_step_and_a_single_replica(
    pool: Pools, ranks: int, partitions: int
) -> None:
    assert all(pool(ranks).run(uneven_from_the_first_step, partitions))


def join_where_nobody_can_meet() -> None:
    with started(partitions=2, ddp=False):
        model = smp.DistributedModel(net())
        with pytest.raises(SMPError, match="there is one without ddp=True"), model.join():
            pass
    with started():
        model = smp.DistributedModel(net())
        with pytest.raises(SMPError, match="ended before the first step"), model.join():
            pass


def test_join_without_replicas_or_steps_is_an_error(pool: Pools) -> None:
    pool(2).run(join_where_nobody_can_meet)


def state_dict_as_torchs() -> None:
    with started(partitions=2):
        model = smp.DistributedModel(net())
        smp.step(lambda x: model(x))(rows(0))
        wanted = net().state_dict()
        into: OrderedDict[str, Any] = OrderedDict(other=1)
        assert model.state_dict(destination=into, prefix="model.") is into
        assert list(into) == ["other", *(f"model.{name}" for name in wanted)]
        for name, value in wanted.items():
            assert torch.equal(into[f"model.{name}"], value)
        with pytest.raises(SMPUnsupportedError, match=r"keep_vars=True.*local_named_parameters"):
            model.state_dict(keep_vars=True)
        again = model.load_state_dict(model.local_state_dict(), same_partition_load=True)
        assert again.missing_keys == again.unexpected_keys == []
        with pytest.raises(TypeError, match="expected a state dict, got int"):
            model.load_state_dict(5)
        assert model.to("cpu") is model
        if not torch.cuda.is_available():  # asked for what lives here alone
            with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
                model.cuda()


def test_state_dicts_of_a_split_model_take_torchs_arguments(pool: Pools) -> None:
    pool(2).run(state_dict_as_torchs)


def refused() -> None:
    with started(partitions=2):
        for wrong in ({"backward_passes_per_step": 0}, {"backward_passes_per_step": "2"}):
            with pytest.raises(
                ValueError, match="backward_passes_per_step must be an int of at least 1, got"
            ):
                smp.DistributedModel(net(), **wrong)
        for cap in (-1, "25", None, math.inf, math.nan, True):
            with pytest.raises(ValueError, match="bucket_cap_mb must be a positive number of MiB, got"):
                smp.DistributedModel(net(), bucket_cap_mb=cap)
        model = smp.DistributedModel(net())
        for register in (model.register_post_partition_hook, model.register_post_step_hook):
            with pytest.raises(TypeError, match=r"expected a function of \(model, optimizer\), got 3"):
                register(3)
        with pytest.raises(SMPError, match="DistributedModel was given to DistributedDataParallel"):
            nn.parallel.DistributedDataParallel(model)
        with pytest.raises(SMPUnsupportedError, match="does not support create_graph"):
            model.backward(torch.ones(1), create_graph=True)
        with pytest.raises(TypeError, match=r"settings in a dict, not by keyword: .*\{'partitions': 2\}"):
            smp.init(partitions=2)
        with pytest.raises(TypeError, match=r"expected a torch\.nn.Module, got 3"):
            smp.set_partition(3, 1)
        with pytest.raises(TypeError, match=r"expected a torch\.nn.Module, got 3"):
            smp.set_activation_checkpointing(3)
        with pytest.raises(TypeError, match=r"expected a torch\.nn.Sequential, got Linear"):
            checkpoint_sequential(nn.Linear(1, 1), torch.ones(1))
        with pytest.raises(TypeError, match="the rank must be an int, got '0'"):
            smp.send(1, "0", smp.WORLD_RANK)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(TypeError, match=r"takes no scale_windows; .*scale_window"):
            smp.DistributedOptimizer(optimizer, scale_windows=1000)
        wrapped = smp.DistributedOptimizer(optimizer, static_loss_scale=None, dynamic_loss_args={})
        with pytest.raises(TypeError, match="expected a state dict, got int"):
            wrapped.load_state_dict(3)
        for norm in ("x", None):
            with pytest.raises(TypeError, match="clip_master_grads: max_norm must be a number, got"):
                wrapped.clip_master_grads(norm)
        for norm in (-1.0, float("nan")):
            with pytest.raises(ValueError, match="clip_master_grads: max_norm must be at least 0, got"):
                wrapped.clip_master_grads(norm)


def test_wrong_arguments_are_refused_with_one_clear_error(pool: Pools) -> None:
    pool(2).run(refused)


def lines_named_by_warnings() -> None:
    """Of the backward in the step function, and of the step's call with another batch."""
    with started(partitions=2):
        model = smp.DistributedModel(net())

        @smp.step
        def train_step(x: Tensor) -> None:
            model(x).square().mean().backward()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(rows(0))
            train_step(rows(smp.rank()))
    text, source = [str(warning.message) for warning in caught], Path(__file__).read_text().splitlines()
    lines = [source[warning.lineno - 1].strip() for warning in caught if warning.filename == __file__]
    both = ["model(x).square().mean().backward()", "train_step(rows(smp.rank()))"]
    assert lines == both[dist.get_rank() :], text


def untraced() -> None:
    with started(partitions=2, auto_partition=False, default_partition=0):
        model = smp.DistributedModel(net(), trace_memory_usage=True)
        with pytest.warns(UserWarning, match="trace_memory_usage are ignored: auto_partition is False"):
            smp.step(lambda x: model(x).sum())(rows(0))


def test_warnings_in_a_step_name_the_scripts_line(pool: Pools) -> None:
    pool(2).run(lines_named_by_warnings)


def test_tracing_without_a_partitioner_is_said_to_be_ignored(pool: Pools) -> None:
    pool(2).run(untraced)


def step_options() -> None:
    for names in ("mask", 3):
        with pytest.raises(TypeError, match="non_split_inputs must be a list of argument names, got"):
            smp.step(non_split_inputs=names)  # type: ignore[call-overload]
    for axes in (["x"], {"x": "0"}, {"x": 0.5}):
        with pytest.raises(TypeError, match="input_split_axes must be a dict of argument names and axes"):
            smp.step(input_split_axes=axes)  # type: ignore[call-overload]
    with started():
        model = smp.DistributedModel(net())
        for none in (None, [], {"mask"}):
            step = smp.step(non_split_inputs=none, input_split_axes=None)(lambda x, **mask: model(x))  # type: ignore[call-overload]
            assert step(rows(0)).concat().shape == (4, 2)
        smp.step(lambda x: model.backward(model(x).sum(), None, False, False))(rows(0))  # as torch's
        with pytest.raises(ValueError, match="got 1 tensors and 2 gradients"):
            smp.step(lambda x: model.backward([model(x)], [torch.ones(2, 2)] * 2))(rows(0))


def test_options_of_a_step_are_checked_where_they_are_given(pool: Pools) -> None:
    pool(1).run(step_options)


def full_checkpoint_with_an_optimizer(folder: Path) -> None:
    with started(partitions=2):
        model = smp.DistributedModel(net())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        smp.step(lambda x: model(x))(rows(0))
        smp.save_checkpoint(str(folder), "all.pt", partial=False, model=model, optimizer=optimizer)
        assert list(torch.load(folder / "all.pt")) == list(net().state_dict())
        plain = torch.optim.SGD(net().parameters(), lr=0.2)
        plain.load_state_dict(torch.load(folder / "optimizer_all.pt"))
        assert plain.param_groups[0]["lr"] == 0.1
        with pytest.raises(ValueError, match="nothing to save"):
            smp.save_checkpoint(str(folder), "none", partial=False)
        with pytest.raises(TypeError, match=r"expected a smp\.DistributedModel, got Sequential"):
            smp.save_checkpoint(str(folder), "plain", model=net())
        with pytest.raises(TypeError, match=r"expected what smp\.DistributedOptimizer returned, got SGD"):
            smp.save_checkpoint(str(folder), "plain", optimizer=plain)
        with pytest.raises(TypeError, match=r"path=None must be the name of a folder"):
            smp.save_checkpoint(None, "plain", model=model)
        with pytest.raises(TypeError, match=r"the tag 7 must be a text, such as '7'"):
            smp.save_checkpoint(str(folder), 7, model=model)
        with pytest.raises(ValueError, match=r"'xxxx.* has 201 bytes; give one of at most 200,"):
            smp.save_checkpoint(str(folder), 201 * "x", model=model)


def test_a_full_checkpoint_has_the_optimizer_in_a_file_of_its_own(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(full_checkpoint_with_an_optimizer, tmp_path)


def settings_as_texts() -> None:
    """A launcher may pass every value as text; the defaults that follow from them must be the same."""
    with started(partitions="2", ddp="True"):
        assert smp.state.cfg.active_microbatches == 4
        smp.init()  # what importing transformers does: asks for nothing, changes nothing
        assert smp.state.cfg.microbatches == 2 == dist.get_world_size()


def test_settings_may_be_texts_and_a_second_init_may_have_none(pool: Pools) -> None:
    pool(2).run(settings_as_texts)


def torchs_scaler_in_a_step() -> None:
    """It makes its scale at the first loss, which is in the dry run that plans the partitions."""
    with started(partitions=2):
        model = smp.DistributedModel(net())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        @smp.step
        def train_step(x: Tensor) -> None:
            model.backward(scaler.scale(model(x).square().mean()))

        train_step(rows(0))
        with pytest.warns(UserWarning, match=r"Use smp\.amp\.GradScaler"):
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0
        whole = net()
        whole(rows(0)).square().mean().backward()
        wanted = {name: parameter - 0.1 * parameter.grad for name, parameter in whole.named_parameters()}
        for name, mine in model.local_named_parameters():
            torch.testing.assert_close(mine, wanted[name])


def test_torchs_own_scaler_works_in_a_step_and_is_warned_of(pool: Pools) -> None:
    pool(2).run(torchs_scaler_in_a_step)


def scalers_on_a_device() -> None:
    with started():
        for made in (
            smp.amp.GradScaler("cpu", 32.0, 3.0),
            smp.amp.GradScaler(torch.device("cpu"), init_scale=32.0, growth_factor=3.0),
            smp.amp.GradScaler(32.0, 3.0, device="cpu"),
        ):
            assert (made.get_scale(), made.get_growth_factor(), made.is_enabled()) == (32.0, 3.0, True)
            assert made.scale(torch.ones(1)).device.type == "cpu"
        assert smp.amp.GradScaler("cuda", enabled=False).scale(torch.ones(1)).item() == 1.0
        with pytest.raises(TypeError, match=r"two devices, 'cpu' and device='cuda'"):
            smp.amp.GradScaler("cpu", device="cuda")  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="growth"):
            smp.amp.GradScaler("cpu", growth=2.0)  # type: ignore[call-overload]


def test_scripts_that_ask_for_the_last_version_find_it() -> None:
    assert smdistributed.modelparallel.__version__ == "1.15.0"


def test_a_scaler_takes_its_device_first_or_by_name(pool: Pools) -> None:
    pool(1).run(scalers_on_a_device)


class Trainer:
    """As transformers' trainer has its steps: in a class body, with and without ``self``."""

    factor = 2.0

    @smp.step
    def without(model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        model.backward(loss)
        return loss.detach()

    @smp.step()
    def method(self, model: Any, x: Tensor) -> Tensor:
        loss: Tensor = self.factor * model(x).square().mean()
        model.backward(loss)
        return loss.detach()

    @classmethod
    @smp.step
    def of_class(cls, model: Any, x: Tensor) -> Tensor:
        return cls.factor * model(x).square().mean()

    @staticmethod
    @smp.step
    def static(model: Any, x: Tensor) -> Tensor:
        return model(x).square().mean()

    @smp.step
    def hidden(*args: Any) -> Tensor:
        self, model, x = args
        return self.factor * model(x).square().mean()


def steps_in_a_class_body() -> None:
    with started():
        model, trainer, x = smp.DistributedModel(net()), Trainer(), rows(0)
        once = [
            one(model, x).reduce_mean()
            for one in (trainer.without, Trainer.without, trainer.static, Trainer.static)
        ]
        twice = [one(model, x).reduce_mean() for one in (trainer.method, trainer.of_class, trainer.hidden)]
        torch.testing.assert_close(torch.stack(once), torch.stack([once[0]] * 4))
        torch.testing.assert_close(torch.stack(twice), torch.stack([2 * once[0]] * 3))
        assert Trainer.without.__name__ == "without"


def test_a_step_in_a_class_body_is_a_method_only_where_it_has_a_self(pool: Pools) -> None:
    pool(2).run(steps_in_a_class_body)
