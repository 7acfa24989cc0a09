"""Hugging Face models, unmodified and with the loss inside, split over two and four stages."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPUnsupportedError
from tests.ranks.models.case import Case
from tests.support.equality import Pools, cases, compare, equal_gradients, find
from tests.support.matrix import some_setups
from tests.support.partitioned import restart

CASES = list(enumerate(cases("huggingface")))


@pytest.mark.parametrize(("number", "case"), CASES, ids=[case.name for _, case in CASES])
def test_a_split_language_or_vision_model_trains_like_plain_pytorch(
    pool: Pools, number: int, case: Case
) -> None:
    for setup in some_setups(case, number):
        wrong = compare(pool, "huggingface", case, setup)
        assert not wrong, "\n".join(wrong)


def check_hidden_states(name: str) -> None:
    case = find("huggingface", name)
    ids, _ = case.batch(0, 4)
    plain = case.build().eval()
    with torch.no_grad():
        expected = plain(input_ids=ids, output_hidden_states=True)
    smp.init({"partitions": 2, "microbatches": 2})
    try:
        model = smp.DistributedModel(case.build().eval())
        forward = smp.step(lambda ids: model(input_ids=ids, output_hidden_states=True))
        for _ in range(2):
            with torch.no_grad():
                found = forward(ids)
            assert type(found) is type(expected)
            for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
                torch.testing.assert_close(one.concat(), other)
    finally:
        smp.shutdown()


@pytest.mark.parametrize("name", ["GPT-2, eager", "BERT, eager"])
def test_hidden_states_of_every_stage_are_returned(pool: Pools, name: str) -> None:
    """transformers installs the hooks that record them in the first forward, which is the dry run's."""
    pool(2).run(check_hidden_states, name)


def logits_of_halves(model: Any, ids: Tensor) -> Tensor:
    """The second half's, which sees the first one through a cache that the caller has made."""
    cache = transformers.DynamicCache()
    for part in ids.chunk(2, dim=1):
        out = model(input_ids=part, past_key_values=cache, use_cache=True)
    found: Tensor = out.logits
    return found


def check_a_cache_as_argument() -> None:
    case = find("huggingface", "GPT-2")
    ids, _ = case.batch(0, 4)
    plain = case.build().eval()
    restart(partitions=2, microbatches=2)
    model = smp.DistributedModel(case.build().eval())
    step = smp.step(lambda ids: logits_of_halves(model, ids))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(step(ids).concat(), logits_of_halves(plain, ids))
    smp.shutdown()


def test_a_cache_that_is_passed_as_an_argument_is_filled_on_all_stages(pool: Pools) -> None:
    pool(2).run(check_a_cache_as_argument)


def check_generating() -> None:
    case = find("huggingface", "GPT-2")
    prompts, _ = case.batch(0, 4)
    prompts = prompts[:, :3]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = case.build().eval().generate(prompts, **options)
    for trains in (True, False):
        restart(partitions=2, microbatches=2)
        model = smp.DistributedModel(case.build())
        step = smp.step(lambda ids, model=model: model.backward(model(input_ids=ids, labels=ids).loss))
        generate = smp.step(lambda ids, model=model: model.module.generate(ids, **options))
        if trains:
            step(prompts)
        model.eval()
        with torch.no_grad():
            found = generate(prompts)
        assert found.concat().equal(expected)
    model.cpu()
    assert model.get_module().generate(prompts, **options).equal(expected)
    smp.shutdown()


def test_a_split_model_generates_in_steps_and_gathered_as_a_whole(pool: Pools) -> None:
    pool(2).run(check_generating)


def check_searching(options: dict[str, Any]) -> None:
    """Without a step that trains before it: the last stage then chooses what earlier stages go on with."""
    case = find("huggingface", "GPT-2")
    prompts, _ = case.batch(0, 4)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **options}
    expected = case.build().eval().generate(prompts[:, :3], **options)
    restart(partitions=2, microbatches=2)
    model = smp.DistributedModel(case.build().eval())
    generate = smp.step(lambda ids: model.module.generate(ids, **options))
    with torch.no_grad():
        for _ in range(2):
            assert generate(prompts[:, :3]).concat().equal(expected)
    smp.shutdown()


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_a_split_model_generates_with_beams_and_with_a_static_cache(
    pool: Pools, options: dict[str, Any]
) -> None:
    pool(2).run(check_searching, options)


ASKING = ("GPT-2, eager", "BERT, eager", "Llama, eager", "T5", "ViT")


def eager(name: str) -> nn.Module:
    module = find("huggingface", name).build().eval()
    for submodule in module.modules():
        if isinstance(submodule, transformers.PreTrainedModel):
            submodule.config._attn_implementation = "eager"  # the others compute no attentions
    return module


def attentions(out: Any) -> dict[str, list[Tensor]]:
    lists = {name: out[name] for name in out if name.endswith("attentions")}
    return {name: [as_tensor(element) for element in value] for name, value in lists.items()}


def as_tensor(value: Any) -> Tensor:
    whole: Tensor = value if isinstance(value, Tensor) else value.concat()
    return whole


def check_attentions(stages: int) -> None:
    for name in ASKING:
        case = find("huggingface", name)
        inputs, _ = case.batch(0, 4)
        key = "pixel_values" if name == "ViT" else "input_ids"
        given = {key: inputs, **({"labels": inputs} if name == "T5" else {})}
        with torch.no_grad():
            expected = attentions(eager(name)(**given, output_attentions=True))
        assert expected and all(len(one) in (0, 2, 4) for one in expected.values())
        restart(partitions=stages, microbatches=2)
        model = smp.DistributedModel(eager(name))
        forward = smp.step(lambda given, model=model: model(**given, output_attentions=True))
        for _ in range(2):
            with torch.no_grad():
                found = attentions(forward(given))
            torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")
    smp.shutdown()


@pytest.mark.parametrize("stages", [2, 4])
def test_attentions_of_every_stage_are_returned(pool: Pools, stages: int) -> None:
    """They are collected by hooks inside the blocks, which are run piece by piece for that."""
    pool(stages).run(check_attentions, stages)


def experts() -> nn.Module:
    """A mixture of experts; a loss on its routers' logits, which hooks collect, keeps their load even."""
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=4,
            output_router_logits=True,
            router_aux_loss_coef=0.5,
        )
    )


def train_experts(by_hand: bool) -> list[str]:
    """Names of the parameters whose gradients equal plain PyTorch's."""
    ids = torch.randint(50, (8, 8), generator=torch.Generator().manual_seed(1))
    plain, module = experts(), experts()
    for part in ids.chunk(2):
        torch.autograd.backward(plain(input_ids=part, labels=part).loss / 2)
    restart(partitions=2, microbatches=2, auto_partition=not by_hand, default_partition=0)
    if by_hand:
        smp.set_partition(module.model.layers[2], 1)
        smp.set_partition(module.model.layers[3], 1)
    model = smp.DistributedModel(module)

    @smp.step
    def step(ids: Tensor) -> None:
        model.backward(model(input_ids=ids, labels=ids).loss)

    step(ids)
    equal = equal_gradients(module, plain)
    smp.shutdown()
    return equal


@pytest.mark.parametrize("by_hand", [False, True], ids=["automatic", "by hand"])
def test_a_loss_on_all_routers_of_a_mixture_of_experts_trains_like_plain_pytorch(
    pool: Pools, by_hand: bool
) -> None:
    """transformers registers the hooks that collect their logits in the first forward."""
    found = pool(2).run(train_experts, by_hand)
    names = [name for name, _ in experts().named_parameters()]
    assert sorted(name for item in found for name in item) == sorted(names)
    assert all(found)


def ask_later(settings: dict[str, Any]) -> list[str]:
    smp.init({"partitions": 2, "microbatches": 2, **settings})
    module = eager("GPT-2, eager")
    smp.set_partition(module.transformer.h[2], 1)
    model = smp.DistributedModel(module)
    forward = smp.step(lambda ids, **more: model(input_ids=ids, **more))
    ids, _ = find("huggingface", "GPT-2, eager").batch(0, 4)
    forward(ids)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forward(ids, output_hidden_states=True)
    with pytest.raises(SMPUnsupportedError, match=r"attn' carried a tensor out of .*before the first step"):
        forward(ids, output_attentions=True)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("settings", [{}, {"auto_partition": False, "default_partition": 0}], ids=str)
def test_attentions_that_are_asked_for_later_are_refused(pool: Pools, settings: dict[str, Any]) -> None:
    for [message] in pool(2).run(ask_later, settings, backend=None):  # the error ends the groups of smp
        assert "got a forward hook, which runs only where module" in message


class Pretrained(nn.Sequential):
    """Saves like a model of transformers."""

    def save_pretrained(self, folder: str, state_dict: dict[str, Tensor] | None = None) -> list[str]:
        return sorted(self.state_dict() if state_dict is None else state_dict)


def saves(settings: dict[str, Any]) -> list[str]:
    """What saving without a state dict says."""
    restart(**settings)
    module = Pretrained(nn.Linear(2, 2), nn.Linear(2, 2))
    if "tensor_parallel_degree" in settings:
        smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    smp.step(lambda rows: model(rows))(torch.ones(2, 2))
    whole = model.state_dict()
    assert model.module.save_pretrained("folder", state_dict=whole) == sorted(whole)
    assert Pretrained(nn.Linear(1, 1)).save_pretrained("folder") == ["0.bias", "0.weight"]  # one of its class
    said = []
    for pretrained in (model.module, model.get_module()):
        try:
            assert pretrained.save_pretrained("folder") == sorted(whole)
        except SMPUnsupportedError as error:
            said.append(str(error))
    return said


def test_saving_a_part_of_a_model_without_a_state_dict_says_what_to_do(pool: Pools) -> None:
    shared = {"ddp": True, "tensor_parallel_degree": 2}
    for settings in ({"partitions": 2}, {"ddp": True, "sharded_data_parallel_degree": 2}, shared):
        for said in pool(2).run(saves, settings):
            assert len(said) == 2 and all("state_dict=weights" in text for text in said), said
    assert pool(2).run(saves, {"ddp": True}) == [[], []]
