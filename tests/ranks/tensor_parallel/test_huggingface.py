"""Hugging Face's models distributed by themselves train as the originals, and translate both ways."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPUnsupportedError
from tests.support.partitioned import restart
from tests.support.ranks import RankPool
from tests.support.tensor_parallel import plain_training, require_equal, shared_training

Pools = Callable[[int], RankPool]
WORDS, VOCABULARY = 6, 37  # 37: the vocabulary's slices differ in size
SIZES = {"vocab_size": VOCABULARY, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
DECODER = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, **SIZES}
ENCODER = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def make_gpt2(**more: Any) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**DECODER, **more}))


def make_gptj() -> nn.Module:
    return transformers.GPTJForCausalLM(transformers.GPTJConfig(rotary_dim=4, **DECODER))


def make_gptneo() -> nn.Module:
    config = transformers.GPTNeoConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=3,
        max_position_embeddings=16,
        attention_dropout=0.0,
        resid_dropout=0.0,
        embed_dropout=0.0,
    )
    return transformers.GPTNeoForCausalLM(config)


def make_bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**ENCODER))


def make_roberta() -> nn.Module:
    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**ENCODER, pad_token_id=1))


MODELS = {
    "gpt2": make_gpt2,
    "gptj": make_gptj,
    "gptneo": make_gptneo,
    "bert": make_bert,
    "roberta": make_roberta,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(5)
    return MODELS[name]()


def mean_loss(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, attention_mask=mask, labels=ids).loss
    return loss


def train(name: str, stages: int, microbatches: int, prescaled: bool) -> None:
    config = {
        "tensor_parallel_degree": 2,
        "partitions": stages,
        "microbatches": microbatches,
        "prescaled_batch": prescaled,
    }
    wanted = plain_training(made(name), mean_loss, WORDS, VOCABULARY)

    def place(module: nn.Module) -> None:
        if stages > 1 and hasattr(module, "transformer"):
            smp.set_partition(module.transformer.seq_layers[1].output, 1)

    found, model = shared_training(
        lambda: made(name),
        mean_loss,
        WORDS,
        VOCABULARY,
        config=config,
        place=place,
        torch_clips=microbatches == 1,
    )
    there, here = smp.state.module_manager.translate_functions[0]
    require_equal(found, wanted, translate=there)
    again = here(there(found.state))
    assert again.keys() == found.state.keys()
    assert all(value.equal(found.state[name]) for name, value in again.items())
    module = model.get_module()
    stack = module.transformer if hasattr(module, "transformer") else module.base_model.encoder
    for layer in stack.seq_layers:
        assert layer.attention.options.hidden_size == 16 and layer.output.dense1.shards
    plain = made(name)
    plain.load_state_dict(there(found.state))


SETUPS = [(2, 1, 2, True), (2, 1, 1, False), (4, 2, 2, True), (4, 2, 2, False)]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_hugging_face_is_distributed_by_itself_and_trains_like_the_original(
    pool: Pools, name: str
) -> None:
    for size, stages, microbatches, prescaled in SETUPS:
        pool(size).run(train, name, stages, microbatches, prescaled)


def load_pretrained() -> None:
    """Values come along, from a checkpoint of the original too, and logits are whole in evaluation."""
    smp.init({"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True})
    plain = made("gpt2").eval()
    with smp.model_creation(tensor_parallelism=True, flash_attention=True):
        other = make_gpt2()
    model = smp.DistributedModel(other).eval()
    translation = smp.nn.huggingface.gpt2.translate_hf_state_dict_to_smdistributed
    model.load_state_dict(translation(plain.state_dict()))
    ids = torch.arange(WORDS).expand(2, -1)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits)
        torch.testing.assert_close(model(ids, labels=ids).loss, plain(ids, labels=ids).loss)
    assert model.train()(ids, labels=ids).logits is None
    with pytest.raises(
        ValueError, match=r"GPT2 was distributed .* does not take past_key_values, output_attentions"
    ):
        model(ids, past_key_values=(), output_attentions=True)

    for more in ({"logits_to_keep": 1}, {"shift_labels": ids}, {"inputs_embeds": ids}):
        with pytest.raises(ValueError, match=rf"GPT2 was distributed .* does not take {next(iter(more))}"):
            model(ids, **more)
    with pytest.raises(ValueError, match="does not take an attention_mask of 4 axes"):
        model(ids, attention_mask=ids[:, None, None])
    with pytest.raises(SMPUnsupportedError, match=r"GPT2 was distributed .* does not generate"):
        model.get_module().generate(ids)


def test_a_distributed_model_takes_a_checkpoint_of_the_original(pool: Pools) -> None:
    pool(2).run(load_pretrained)


class OwnMLP(nn.Module):
    """A script's own, with the parameters of Hugging Face's."""

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__()
        self.c_fc, self.c_proj = theirs.c_fc, theirs.c_proj

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.c_proj(torch.relu(self.c_fc(hidden)))
        return output


def changed(name: str) -> nn.Module:
    """What scripts do to a model that a distributed one would not do."""
    model = made("gptj" if name == "frozen" else "gpt2")
    layer = model.transformer.h[0]
    if name == "module":
        layer.mlp = OwnMLP(layer.mlp)
    elif name == "parameter":
        layer.scale = nn.Parameter(torch.ones(1), requires_grad=False)
    elif name == "hook":
        layer.mlp.register_forward_hook(lambda _, args, output: 2 * output)
    else:
        layer.attn.q_proj.weight.requires_grad_(False)
    return model


def stay(name: str) -> None:
    config = {"tensor_parallel_degree": 2, "prescaled_batch": True}
    wanted = plain_training(changed(name), mean_loss, WORDS, VOCABULARY)
    found, model = shared_training(lambda: changed(name), mean_loss, WORDS, VOCABULARY, config=config)
    require_equal(found, wanted)
    assert not hasattr(model.get_module().transformer, "seq_layers")


def test_models_that_a_script_has_changed_are_not_replaced(pool: Pools) -> None:
    for name in ("module", "parameter", "hook", "frozen"):
        pool(2).run(stay, name)


def several_texts_in_a_row() -> None:
    """Positions that begin again are those of another text, which no word sees."""

    def packed(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        positions = torch.tensor([[0, 1, 0, 1, 2, 3]]).expand(len(ids), -1)
        loss: Tensor = model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss
        return loss

    config = {"tensor_parallel_degree": 2}
    wanted = plain_training(made("gpt2"), packed, WORDS, VOCABULARY)
    found, _ = shared_training(lambda: made("gpt2"), packed, WORDS, VOCABULARY, config=config)
    require_equal(found, wanted, translate=smp.state.module_manager.translate_functions[0][0])


def padded_on_one_rank() -> None:
    """Hugging Face makes no mask where nothing is padded, so that one rank has one and another has none."""

    def loss(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        rows = torch.arange(8)[:, None] if len(ids) == 8 else 4 * smp.rank() + torch.arange(4)[:, None]
        return mean_loss(model, ids, torch.where(rows < 4, torch.ones_like(mask), mask))

    wanted = plain_training(made("bert"), loss, WORDS, VOCABULARY)
    config = {"tensor_parallel_degree": 2}
    found, _ = shared_training(lambda: made("bert"), loss, WORDS, VOCABULARY, config=config)
    require_equal(found, wanted, translate=smp.state.module_manager.translate_functions[0][0])


def test_masks_are_those_of_hugging_face(pool: Pools) -> None:
    pool(2).run(several_texts_in_a_row)
    pool(2).run(padded_on_one_rank)


def make_llama() -> nn.Module:
    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16, "pad_token_id": None}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))


def train_llama(stages: int, prescaled: bool) -> None:
    config = {"tensor_parallel_degree": 2, "partitions": stages, "prescaled_batch": prescaled}
    wanted = plain_training(make_llama(), mean_loss, WORDS, VOCABULARY)
    found, model = shared_training(make_llama, mean_loss, WORDS, VOCABULARY, config=config)
    require_equal(found, wanted)
    assert len(list(model.distributed_modules())) == 2 * 7 + 2


def test_a_llama_is_distributed_linear_by_linear(pool: Pools) -> None:
    pool(2).run(train_llama, 1, False)
    pool(4).run(train_llama, 2, True)


def checkpointed_layers() -> None:
    """The layers of a distributed transformer, and their parts, are computed once more in backward."""
    config = {"tensor_parallel_degree": 2, "partitions": 2, "microbatches": 2, "prescaled_batch": True}
    wanted = plain_training(made("gpt2"), mean_loss, WORDS, VOCABULARY)

    def place(module: nn.Module) -> None:
        layers = module.transformer.seq_layers
        smp.set_partition(layers[1], 1)
        smp.set_activation_checkpointing(layers[0].attention)
        smp.set_activation_checkpointing(layers[0].output)
        smp.set_activation_checkpointing(layers[1], pack_args_as_tuple=True)

    found, _ = shared_training(lambda: made("gpt2"), mean_loss, WORDS, VOCABULARY, config=config, place=place)
    require_equal(found, wanted, translate=smp.state.module_manager.translate_functions[0][0])


def switched_on_before() -> None:
    """Hugging Face's switch is for the layers that take the places of theirs, too."""
    restart(tensor_parallel_degree=2, ddp=True, prescaled_batch=True)
    with smp.tensor_parallelism(vocab_parallel=True, gather_logits=True):  # which is for other modules
        bert = made("bert")
    bert.gradient_checkpointing_enable()
    model = smp.DistributedModel(bert)
    runs = []
    layer = model.get_module().bert.encoder.seq_layers[0].output
    layer.register_forward_pre_hook(lambda *_: runs.append(1))
    ids = torch.ones(2, 3, dtype=torch.long)

    @smp.step
    def step_function(ids: Tensor) -> None:
        model.backward(model(input_ids=ids, labels=ids).loss)

    step_function(ids)
    assert len(runs) == 2


def test_layers_of_a_distributed_transformer_are_checkpointed(pool: Pools) -> None:
    pool(4).run(checkpointed_layers)
    pool(2).run(switched_on_before)


@pytest.mark.parametrize("name", MODELS)
def test_names_translate_both_ways_without_loss(name: str) -> None:
    module = importlib.import_module(f"smdistributed.modelparallel.torch.nn.huggingface.{name}")
    there = getattr(module, f"translate_state_dict_to_hf_{name}")
    here = getattr(module, f"translate_hf_state_dict_to_smdistributed_{name}")
    original = made(name).state_dict()
    back = there(here(original), max_seq_len=16)
    assert back.keys() == original.keys()
    assert all(back[key].equal(value) for key, value in original.items())
