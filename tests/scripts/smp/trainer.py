"""A training script with a trainer class, as those are that save with ``smp.save`` and convert files."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2Config, GPT2LMHeadModel, GPTJConfig, GPTJForCausalLM

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.nn import FusedLayerNorm
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import translate_hf_state_dict_to_smdistributed
from smdistributed.modelparallel.torch.nn.huggingface.gptj import (
    translate_hf_state_dict_to_smdistributed_gptj,
)
from smdistributed.modelparallel.torch.sharded_data_parallel_checkpoint import (
    get_full_state_dict_from_sharded_data_parallel_checkpoint,
)

VOCABULARY, LENGTH, ROWS = 40, 12, 8
TRANSLATIONS = {
    "gpt2": translate_hf_state_dict_to_smdistributed,
    "gptj": translate_hf_state_dict_to_smdistributed_gptj,
}
WEIGHTS, OPTIMIZER, SCHEDULER = "pytorch_model.bin", "optimizer.pt", "scheduler.pt"


def whole_batch(step):
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (ROWS, 1), generator=generator)
    return (start + torch.arange(LENGTH)) % VOCABULARY


def batch(step):
    return whole_batch(step).chunk(smp.rdp_size())[smp.rdp_rank()]


def make_model(args):
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 4, "n_head": 2}
    none = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    common = {**sizes, **none, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    if args.model_type == "gptj":
        return GPTJForCausalLM(GPTJConfig(**common, rotary_dim=4))
    return GPT2LMHeadModel(GPT2Config(**common))


def param_groups(model):
    """Weight decay for all but biases and norms."""
    decayed, others = [], []
    for module in model.modules():
        is_norm = isinstance(module, torch.nn.LayerNorm | FusedLayerNorm)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                (others if is_norm or name == "bias" else decayed).append(parameter)
    decayed, others = list(dict.fromkeys(decayed)), list(dict.fromkeys(others))
    return [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]


class Trainer:
    def __init__(self, args):
        self.args = args
        with smp.model_creation(tensor_parallelism=smp.tp_size() > 1):
            module = make_model(args)
        self.model = smp.DistributedModel(module, backward_passes_per_step=1)
        if args.pretrained:
            pretrained = torch.load(args.pretrained)
            translate = TRANSLATIONS[args.model_type] if smp.tp_size() > 1 else dict
            self.model.load_state_dict(translate(pretrained))
        if smp.pp_size() > 1 and smp.tp_size() == 1:
            for number, layer in enumerate(self.inner().transformer.h):
                smp.set_partition(layer, number * smp.pp_size() // 4)
        optimizer = torch.optim.AdamW(param_groups(self.model), lr=0.01)
        self.optimizer = smp.DistributedOptimizer(optimizer)
        inner = self.optimizer.optimizer if smp.state.cfg.fp16 else self.optimizer
        self.scheduler = LambdaLR(inner, lambda step: min(1.0, (step + 1) / 3))
        self.step = 0

    def inner(self):
        """As scripts of before ``get_module`` reached through the wrappers."""
        inner = self.model.module
        return inner.module if hasattr(inner, "module") else inner

    @smp.step
    def train_step(model, input_ids):  # a step function in a class, which has no instance
        loss = model(input_ids=input_ids, labels=input_ids)["loss"]
        loss /= 1
        model.backward(loss)
        return loss

    @smp.step()
    def forward_only(self, model, input_ids):
        return model(input_ids=input_ids, labels=input_ids)

    def train(self):
        while self.step < self.args.max_steps:
            self.optimizer.zero_grad()
            loss_mb = self.train_step(self.model, batch(self.step))
            loss = loss_mb.reduce_mean().detach()
            assert torch.isclose(loss_mb.reduce_sum() / len(loss_mb.outputs), loss, rtol=1e-4)
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            dist.all_reduce(loss, group=smp.get_dp_process_group())
            if smp.rank() == 0:
                print(f"step {self.step} loss {loss.item() / smp.dp_size():.6f}", flush=True)
            if self.step == self.args.save_at:
                self.save(Path(self.args.model_dir) / f"checkpoint-{self.step}")
        self.evaluate()

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            output = self.forward_only(self.model, batch(99))
        losses = smp.allgather(output["loss"].detach().reduce_mean().item(), smp.CommGroup.DP_GROUP)
        if output.get("logits") is not None:
            logits = output["logits"].detach().concat().cpu()
            assert logits.shape == (ROWS // smp.rdp_size(), LENGTH, VOCABULARY)
        if smp.rank() == 0:
            print(f"evaluation {sum(losses) / len(losses):.6f}", flush=True)

    def save(self, folder):
        sharded = has_slices()
        if smp.rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        smp.barrier()
        smp.save_checkpoint(
            str(folder), tag=WEIGHTS, partial=False, model=self.model, user_content={"step": self.step}
        )
        states = self.optimizer.local_state_dict(gather_if_shard=False)
        if smp.rdp_rank() == 0 or sharded:
            smp.save(states, str(folder / OPTIMIZER), partial=True, v3=sharded)
        if smp.rank() == 0:
            torch.save(self.scheduler.state_dict(), folder / SCHEDULER)
        self.save_parts(folder)
        own = self.model.orig_state_dict()
        assert {name for name, _ in self.model.local_named_parameters()} <= own.keys()
        smp.barrier()

    def save_parts(self, folder):
        """A partial checkpoint, whose files are read as those do that convert them."""
        smp.save_checkpoint(
            str(folder),
            tag="parts",
            model=self.model,
            optimizer=self.optimizer,
            user_content={"step": self.step},
        )
        smp.barrier()
        tag = (folder / "newest").read_text().strip()
        assert (folder / tag).is_dir()
        if smp.state.cfg.sharded_data_parallel_degree > 1 and smp.rank() == 0:
            read_shards(folder / tag)
            whole = get_full_state_dict_from_sharded_data_parallel_checkpoint(
                str(folder), tag=tag, dtype=torch.float32
            )
            plain = make_model(self.args)
            plain.load_state_dict(whole)
            torch.save(plain.state_dict(), folder / "full.pt")

    def resume(self, folder):
        assert list(folder.glob(f"{OPTIMIZER}_*")), sorted(folder.iterdir())
        content = smp.resume_from_checkpoint(str(folder), tag=WEIGHTS, partial=False, load_optimizer=False)
        self.step = content["step"]
        state_dict = torch.load(folder / WEIGHTS)
        for to_hf, from_hf in smp.state.module_manager.translate_functions:
            assert to_hf(from_hf(state_dict)).keys() == state_dict.keys()
        self.scheduler.load_state_dict(torch.load(folder / SCHEDULER))
        older = {} if has_slices() else {"back_compat": True}

        def load_optimizer(model, optimizer):
            optimizer.load_state_dict(smp.load(str(folder / OPTIMIZER), partial=True, **older))

        self.model.register_post_step_hook(load_optimizer)


def has_slices():
    """Whether each replica has optimizer state of its own."""
    return smp.state.cfg.shard_optimizer_state or smp.state.cfg.sharded_data_parallel_degree > 1


def read_shards(folder):
    model = torch.load(folder / "model_0.pt", weights_only=False)
    content = torch.load(folder / "user_content.pt", weights_only=False)
    shapes = content["param_shapes"]
    assert set(shapes) | set(content["buffer_names"]) <= set(model["module"])
    optimizers = [torch.load(path, weights_only=False) for path in sorted(folder.glob("optimizer_*.pt"))]
    assert optimizers and optimizers[0]["partition_count"] >= 1
    flat = sum(group.numel() for each in optimizers for group in each["fp32_flat_groups"])
    assert flat >= sum(torch.Size(shape).numel() for shape in shapes.values())


def ask_neighbours():
    """Each tensor-parallel rank tells the first what it is."""
    if smp.tp_size() == 1:
        return
    if smp.tp_rank() > 0:
        smp.send({"tp_rank": smp.tp_rank(), "mp_rank": smp.mp_rank()}, 0, smp.RankType.TP_RANK)
        return
    for rank in range(1, smp.tp_size()):
        assert smp.recv_from(rank, smp.RankType.TP_RANK)["tp_rank"] == rank


def main(words=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_dir", default=os.environ.get("SM_MODEL_DIR"))
    parser.add_argument("--training_dir", default=os.environ.get("SM_CHANNEL_TRAIN"))
    parser.add_argument("--n_gpus", default=os.environ.get("SM_NUM_GPUS"))
    parser.add_argument("--module_dir", default=os.environ.get("SM_MODULE_DIR"))
    parser.add_argument("--current_host", default=os.environ.get("SM_CURRENT_HOST"))
    parser.add_argument("--mp_parameters", default="")
    parser.add_argument("--model_type", default="gpt2")
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--save_at", type=int, default=0)
    parser.add_argument("--resume_from", default=None)
    parser.add_argument("--pretrained", default=None)
    args, _ = parser.parse_known_args(words)

    smp.init()  # as transformers' TrainingArguments do
    smp.init(settings(args.mp_parameters))
    assert smp.is_initialized()
    torch.manual_seed(7)
    ask_neighbours()
    trainer = Trainer(args)
    if args.resume_from:
        trainer.resume(Path(args.resume_from))
    trainer.train()
    smp.barrier()


def settings(words):
    """``key=value,...`` as a dict."""
    pairs = (word.split("=") for word in words.split(",") if word)
    return {
        key: int(value) if value.isdigit() else {"True": True}.get(value, value) for key, value in pairs
    } | {"optimize": "speed"}


if __name__ == "__main__":
    main()
