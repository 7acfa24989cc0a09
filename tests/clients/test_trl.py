"""TRL's SFTTrainer with adapters of PEFT, over a group of the script's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.clients.conftest import Clients
from tests.clients.test_transformers import gpt2, losses_of
from tests.clients.training import Trained, assert_trains_as_over_gloo, trained


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"<{number}>": number for number in range(64)}, unk_token="<1>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", eos_token="<0>")


def train(backend: str, folder: str) -> Trained:
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model_state_dict
    from safetensors.torch import load_file
    from trl import SFTConfig, SFTTrainer

    dist.init_process_group(backend)
    tokens = torch.randint(2, 64, (32, 4), generator=torch.Generator().manual_seed(1)).repeat(1, 2)
    arguments = SFTConfig(
        f"{folder}/{backend}",
        use_cpu=True,
        bf16=False,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=1e-1,
        logging_steps=1,
        gradient_checkpointing=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        gpt2(),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": tokens.tolist()}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model(f"{folder}/{backend}/adapter")
    dist.barrier()
    saved = load_file(f"{folder}/{backend}/adapter/adapter_model.safetensors")
    result = trained(losses_of(trainer), get_peft_model_state_dict(trainer.model), saved=saved)
    dist.destroy_process_group()
    return result


def test_trl_trains_and_saves_adapters_as_over_gloo(clients: Clients, tmp_path: Path) -> None:
    assert_trains_as_over_gloo(clients("trl"), train, str(tmp_path))
