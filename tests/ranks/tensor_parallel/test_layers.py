"""Layers over two tensor-parallel ranks compute what one rank computes, with the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.exceptions import SMPNotInitializedError
from opensmd.modelparallel.ranks.shards import shards_of
from opensmd.modelparallel.state_dicts.distributed_parts import whole_entries
from opensmd.modelparallel.tensor_parallel.distributed_module import mark_outermost
from tests.support.partitioned import restart
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_size": 2, "hidden_size": 8}
LAYER: dict[str, Any] = {**HEADS, "attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
WIDE: dict[str, Any] = {**LAYER, "intermediate_size": 12}
HEAD: dict[str, Any] = {**WIDE, "num_layers": 2, "vocab_size": 19, "num_positions": 8}
PRE: dict[str, Any] = {"pre_layernorm": True, "post_layernorm": False}
ROWS, WORDS = 4, 5


def hidden(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WORDS, 8, generator=generator).requires_grad_()


def ids(size: int = 19) -> Tensor:
    return torch.randint(size, (ROWS, WORDS), generator=torch.Generator().manual_seed(3))


def masked() -> Tensor:
    """1 for what nobody sees."""
    mask = torch.zeros(ROWS, WORDS, dtype=torch.long)
    mask[1::2, -2:] = 1
    return mask


def added() -> Tensor:
    """A mask that is added to the scores."""
    return masked()[:, None, None, :] * torch.finfo(torch.float32).min


nnp = smp.nn
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "linear": (lambda: nnp.DistributedLinear(8, 3), hidden),
    "linear without bias": (lambda: nnp.DistributedLinear(8, 3, bias=False), hidden),
    "embedding": (lambda: nnp.DistributedEmbedding(19, 6, padding_idx=2), ids),
    "embedding by rows": (
        lambda: nnp.DistributedEmbedding(19, 5, padding_idx=-1, vocab_parallel=True, scale_grad_by_freq=True),
        ids,
    ),
    "embedding with a largest norm": (
        lambda: nnp.DistributedEmbedding(19, 5, max_norm=0.02, vocab_parallel=True),
        ids,
    ),
    "embedding of given weights": (
        lambda: nnp.DistributedEmbedding(19, 4, _weight=torch.arange(76.0).view(19, 4)),
        ids,
    ),
    "attention": (lambda: nnp.DistributedAttentionLayer(**LAYER), lambda: (hidden(), masked())),
    "causal attention with an added mask": (
        lambda: nnp.DistributedAttentionLayer(**LAYER, **PRE, causal_mask_size=8),
        lambda: (hidden(), added()),
    ),
    "cross attention": (
        lambda: nnp.DistributedAttentionLayer(**LAYER, cross_attention=True),
        lambda: (hidden(), hidden(1), masked()),
    ),
    "attention with linear biases, in float32": (
        lambda: nnp.DistributedAttentionLayer(
            **LAYER, use_alibi=True, causal_mask_size=8, attention_in_fp32=True
        ),
        lambda: (hidden(), None),
    ),
    "output": (lambda: nnp.DistributedTransformerOutputLayer(8, 12, 0.0, "gelu_new"), hidden),
    "layer": (lambda: nnp.DistributedTransformerLayer(**WIDE), lambda: (hidden(), None)),
    "layer with cross attention and both norms": (
        lambda: nnp.DistributedTransformerLayer(
            **WIDE, add_cross_attention=True, pre_layernorm=True, fp32_residual_addition=True
        ),
        lambda: (hidden(), hidden(1), masked(), None),
    ),
    "layer with rotated positions and one norm": (
        lambda: nnp.DistributedTransformerLayer(
            **WIDE, **PRE, parallel_residual=True, rotary_dim=2, causal_mask_size=8, window_size=2
        ),
        lambda: (hidden(), masked()),
    ),
    "stack": (
        lambda: nnp.DistributedTransformer(2, **WIDE, pre_layernorm=True, use_normal_initialization=True),
        lambda: (hidden(), masked()),
    ),
    "language model": (
        lambda: nnp.DistributedTransformerLMHead(**HEAD, **PRE, causal_mask_size=8, lm_head_bias=True),
        lambda: (ids(), masked(), None, None, ids()),
    ),
    "language model with types, without a loss": (
        lambda: nnp.DistributedTransformerLMHead(**HEAD, num_token_types=2, tie_weights=False),
        lambda: (ids(), masked(), ids(2)),
    ),
    "language model with a whole embedding": (
        lambda: nnp.DistributedTransformerLMHead(**HEAD, distribute_embedding=False),
        lambda: (ids(), None, None, None, ids()),
    ),
    "language model with cross attention, without a head": (
        lambda: nnp.DistributedTransformerLMHead(**HEAD, add_cross_attention=True, add_lm_head=False),
        lambda: (ids(), masked(), None, None, hidden(), masked()),
    ),
}


# On four ranks the last one has no word.
FEW = "language model of five words"
CASES[FEW] = (
    lambda: nnp.DistributedTransformerLMHead(**{**HEAD, "vocab_size": 5}, **PRE, causal_mask_size=8),
    lambda: (ids(5), None, None, None, ids(5)),
)


def run(name: str, tensor: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The first output and all gradients, whole."""
    restart(tensor_parallel_degree=tensor, ddp=True, prescaled_batch=True)
    make, inputs = CASES[name]
    torch.manual_seed(7)
    module = make()
    given = inputs()
    output = module(given)
    first = output[0] if isinstance(output, tuple) else output
    weight = torch.linspace(-1, 2, first.numel()).view(first.shape)
    (first * weight).sum().backward()
    gradients = {each: p.grad for each, p in module.named_parameters() if p.grad is not None}
    found = whole_entries(gradients, shards_of(module))
    tensors = given if isinstance(given, tuple) else (given,)
    for number, tensor_in in enumerate(tensors):
        if isinstance(tensor_in, Tensor) and tensor_in.requires_grad:
            found[f"input {number}"] = tensor_in.grad
    return first.detach(), found


def compare(names: list[str], ranks: int) -> None:
    for name in names:
        output, gradients = run(name, 1)
        shared_output, shared_gradients = run(name, ranks)
        torch.testing.assert_close(shared_output, output, msg=lambda text, name=name: f"{name}: {text}")
        assert shared_gradients.keys() == gradients.keys()
        for key, value in gradients.items():
            margin = 4e-6 * float(value.abs().max()) + 1e-6  # sums of other lengths, in another order
            torch.testing.assert_close(
                shared_gradients[key],
                value,
                rtol=0.0,
                atol=margin,
                msg=lambda text, name=name, key=key: f"{name}, {key}: {text}",
            )


def test_every_layer_computes_and_differentiates_as_on_one_rank(pool: Pools) -> None:
    pool(2).run(compare, list(CASES), 2)
    pool(4).run(compare, [FEW], 4)


def pieces_of_layers() -> None:
    restart(tensor_parallel_degree=2, ddp=True)  # every rank has a batch of its own
    own = slice(2 * smp.tp_rank(), 2 * smp.tp_rank() + 2)
    torch.manual_seed(1)
    whole = nn.Embedding(19, 6)
    given = whole.weight.detach()
    part = nnp.DistributedEmbedding(19, 6, _weight=given, _skip_allgather=True)
    assert part(ids()[own]).equal(whole(ids()[own])[..., 3 * smp.tp_rank() :][..., :3])
    merged = nnp.DistributedEmbedding(19, 6, _weight=given, _skip_scatter_and_merge=True)
    assert merged(ids()[own]).equal(whole(ids()))

    norm, plain = nnp.DistributedLayerNorm(8), nn.LayerNorm(8)
    x, y = hidden(), hidden()
    half = slice(4 * smp.tp_rank(), 4 * smp.tp_rank() + 4)
    mine, wanted = norm(x[..., half]), plain(y)[..., half]
    torch.testing.assert_close(mine, wanted)
    weight = torch.linspace(0, 1, 8)
    (mine * weight[half]).sum().backward()
    (plain(y) * weight).sum().backward()
    assert x.grad is not None and y.grad is not None
    torch.testing.assert_close(x.grad[..., half], y.grad[..., half])

    loss = nnp.VocabularyCrossEntropy(19)
    logits, labels = (
        torch.randn(3, 19, generator=torch.Generator().manual_seed(2)),
        torch.tensor([3, -100, 18]),
    )
    wanted = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(loss(logits.tensor_split([10], -1)[smp.tp_rank()], labels), wanted)


def test_parts_of_layers_are_there_for_those_that_put_them_together(pool: Pools) -> None:
    pool(2).run(pieces_of_layers)


def nobodys() -> None:
    """Where rows are split, no rank may take another's for one that there is not."""
    restart(tensor_parallel_degree=2, ddp=True, prescaled_batch=True)
    embedding = nnp.DistributedEmbedding(19, 4, vocab_parallel=True)
    loss, logits = nnp.VocabularyCrossEntropy(19), torch.zeros(2, 10 - smp.tp_rank())
    for number in (19, -1):
        with pytest.raises(RuntimeError, match="an index of an embedding is outside of 0 to 18"):
            embedding(torch.tensor([3, number]))
        with pytest.raises(RuntimeError, match="a label is outside of 0 to 18"):
            loss(logits, torch.tensor([-100, number]))


def test_indices_that_no_rank_has_are_refused(pool: Pools) -> None:
    pool(2).run(nobodys)


def with_other_shapes() -> None:
    """What has no batch is nobody else's, and batches that would mix are refused."""
    restart(tensor_parallel_degree=2, ddp=True)
    torch.manual_seed(1)
    linear, embedding = nnp.DistributedLinear(4, 2), nnp.DistributedEmbedding(5, 4)
    torch.manual_seed(1)
    plain = nn.Linear(4, 2)
    torch.testing.assert_close(linear(torch.ones(4)), plain(torch.ones(4)))
    assert embedding(torch.tensor(3)).equal(embedding(torch.tensor([3]))[0])
    model = nnp.DistributedTransformerLMHead(**HEAD, **PRE, causal_mask_size=8)
    own = ids()[:2] if smp.tp_rank() == 0 else ids()[2:]
    positions = torch.arange(WORDS)
    torch.testing.assert_close(model(own, None, None, positions), model(own))
    sizes = (2, 3) if smp.tp_rank() == 0 else (3, 2)
    with pytest.raises(
        ValueError, match=r"of different shapes: \[2, 3\] \(torch.int64\), \[3, 2\] .*: pad all"
    ):
        model(torch.ones(sizes, dtype=torch.long))
    pair = nn.ModuleDict({"one": nnp.DistributedLinear(4, 4), "other": nnp.DistributedLinear(4, 4)})
    mark_outermost(pair)
    with pytest.raises(ValueError, match=r"in different distributed modules: one, other\. .* the same way"):
        list(pair.children())[smp.tp_rank()](torch.ones(2, 4))


def test_what_ranks_give_to_a_shared_module_has_a_batch_of_one_shape_or_none(pool: Pools) -> None:
    pool(2).run(with_other_shapes)


def in_all_bits() -> None:
    """What is computed in float32 where numbers have 16 bits keeps the bits of those with 64."""
    restart(tensor_parallel_degree=2, ddp=True, prescaled_batch=True)
    x = hidden().detach().double()
    half = slice(4 * smp.tp_rank(), 4 * smp.tp_rank() + 4)
    own = nnp.DistributedLayerNorm(8).double()(x[..., half])
    torch.testing.assert_close(own, F.layer_norm(x, [8])[..., half], rtol=0.0, atol=1e-14)
    outputs = []
    for wide in (False, True):
        torch.manual_seed(1)
        layer = nnp.DistributedTransformerLayer(**WIDE, attention_in_fp32=wide, fp32_residual_addition=wide)
        outputs.append(layer.double()((x, None))[0])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0.0, atol=1e-14)


def test_nothing_is_rounded_to_fewer_bits(pool: Pools) -> None:
    pool(2).run(in_all_bits)


def refusals() -> None:
    restart(tensor_parallel_degree=2, ddp=True)
    for make, message in (
        (lambda: nnp.DistributedLinear(7, 2), "in_features=7 cannot be divided by 2 tensor-parallel ranks"),
        (lambda: nnp.DistributedEmbedding(4, 4, max_norm=1.0), "max_norm needs whole rows"),
        (lambda: nnp.DistributedAttentionLayer(3, 2, 6), "num_attention_heads=3 cannot be divided"),
        (lambda: nnp.DistributedTransformerOutputLayer(8, 9), "intermediate_size=9 cannot"),
        (
            lambda: nnp.DistributedTransformerLayer(**WIDE, post_layernorm=False),
            "at least one of pre_layernorm",
        ),
        (lambda: nnp.DistributedTransformerLayer(**WIDE, activation="gelo"), "activation='gelo' is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(
        TypeError, match=r"DistributedTransformerLayer takes no flash_atention; .* flash_attention"
    ):
        nnp.DistributedTransformerLayer(**WIDE, flash_atention=True)
    with pytest.warns(UserWarning, match="fused_bias_gelu=True has no effect"):
        nnp.DistributedTransformerLayer(**WIDE, fused_bias_gelu=True)
    lamb = smp.optimizers.FusedLAMB(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="FusedLAMB needs the norms of whole parameters"):
        smp.DistributedOptimizer(lamb)
    with pytest.warns(UserWarning, match="Adafactor looks at matrices as a whole"):
        smp.DistributedOptimizer(torch.optim.Adafactor(nn.Linear(2, 2).parameters()))
    smp.shutdown()
    with pytest.raises(SMPNotInitializedError, match="a distributed module needs"):
        nnp.DistributedLinear(2, 2)


def test_what_cannot_be_shared_is_refused_with_the_reason(pool: Pools) -> None:
    pool(2).run(refusals)
