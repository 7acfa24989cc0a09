"""Some of the zoo's models at every run of the tests, chosen by the kind of trouble they make.

All of them, of more libraries and on other numbers of stages: ``make zoo``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.equality import Pools
from tests.zoo.report import page
from tests.zoo.run import split

# what each is here for
CHOSEN = {
    "transformers: t5": "two towers with one embedding, and positions that the first layer computes for all",
    "transformers: bart": "two towers, tied embeddings, a bias in a buffer",
    "transformers: mixtral": "experts that are chosen by data, and their loss",
    "transformers: mamba": "a state-space layer with a loop in Python",
    "transformers: rwkv": "a state that is handed from layer to layer",
    "transformers: gemma2": "layers of two kinds with masks of their own",
    "transformers: gpt_neo": "attention buffers in each layer",
    "transformers: deberta-v2": "autograd functions of its own and relative positions",
    "transformers: wav2vec2": "convolutions, a parametrized weight, a loss that asks for values",
    "transformers: gpt2": "weights that are transposed, and a head tied to the embedding",
    "transformers: albert": "one layer that is run several times",
    "transformers: fsmt": "inputs that are written into",
    "transformers: longformer": "windows as strided views, filled in place",
    "transformers: big_bird": "blocks drawn with NumPy",
    "transformers: convbert": "kernels of convolutions that are made of the words",
    "transformers: xlnet": "two streams, and memories",
    "transformers: codegen": "heads that are put in another order and back",
    "transformers: fnet": "complex numbers",
    "transformers: nystromformer": "a matrix inverse by iteration",
    "transformers: convnext": "stages of four widths, and scales of layers",
    "transformers: bloom": "biases that are computed once for all layers",
    "transformers: ctrl": "positions in a buffer that the forward sets anew",
    "transformers: clip": "a tower of a model of two",
    "transformers: resnet": "batch norms, whose buffers change in each microbatch",
    "torch: spectral norm": "buffers that a parametrization changes in the forward",
    "torch: weight norm": "a weight that is computed of two in each forward",
    "torch: orthogonal": "a weight that is computed by matrix exponentials",
    "torch: adaptive softmax": "losses of clusters that depend on data",
    "torch: Transformer": "torch's own layers, with a quicker way for evaluation",
    "torch: LSTM": "recurrent layers with weights in one piece of memory",
}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_model_of_the_zoo_trains_like_plain_pytorch_in_three_parts(
    pool: Pools, name: str, tmp_path: Path
) -> None:
    line = split(pool(3), pool(1), name, 3, tmp_path)
    assert line["status"] == "equal", f"{CHOSEN[name]}: {line['why']}"
    assert line["used"] > 1


def test_the_page_of_results_counts_each_case_once_and_gives_reasons() -> None:
    case = {"kind": "split", "stages": 3, "why": "", "code": "1a2b3c4"}
    lines = [
        {**case, "model": "torch: LSTM", "status": "failed", "why": "an earlier try"},
        {**case, "model": "torch: LSTM", "status": "equal", "swayed": True},
        {**case, "model": "torch: GRU", "status": "refused", "why": "SMPError: a | b", "code": "5d6e7f8"},
        {"kind": "tracer", "model": "torch: GRU", "status": "split", "why": ""},
        {"kind": "plain", "model": "torch: RNN", "status": "no case", "why": "draws random numbers"},
    ]
    text = page(lines, listed=5)
    assert "| torch | 2 | 1 | 1 | 0 | 0 | 0 | 0 | 1 of 1 |" in text
    assert "| torch: GRU | 3 | refused | SMPError: a \\| b |" in text
    assert "Of 5 models, 2 have been run and 1 turned out not to be cases." in text
    assert "Equal ones that amplify rounding errors, in plain PyTorch as well: 1." in text
    assert "Revisions of the code: 1a2b3c4 (1), 5d6e7f8 (1)." in text
    assert "earlier" not in text and "RNN" not in text
