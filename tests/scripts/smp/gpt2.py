"""A training script as users write it after the GPT-2 example: data on the first stage only, resumable."""

import argparse
import logging

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import translate_state_dict_to_hf_gpt2
from smdistributed.modelparallel.torch.utils import rmsg

SMP_VERSION = tuple(int(word) for word in smdistributed.modelparallel.__version__.split("."))
VOCABULARY, LENGTH = 37, 12


class Sentences(Dataset):
    """Sequences with a rule that a model can learn."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(VOCABULARY, (count, 1), generator=generator)
        step = torch.randint(1, 4, (count, 1), generator=generator)
        self.ids = (start + step * torch.arange(LENGTH)) % VOCABULARY

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index], torch.ones(LENGTH, dtype=torch.int64)


class DummyDataset(Dataset):
    """What the other stages iterate over: nothing, as often as there is something on the first."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.empty(0), torch.empty(0)


def create_dataloader(args, seed, count):
    if smp.pp_rank() == 0:
        data = Sentences(count, seed)
        data = torch.utils.data.Subset(data, range(smp.rdp_rank(), len(data), smp.rdp_size()))
        loader = DataLoader(data, batch_size=args.train_batch_size, drop_last=True)
        smp.broadcast(len(loader), smp.PP_GROUP)
    else:
        length = smp.recv_from(0, smp.RankType.PP_RANK)
        data = DummyDataset(length * args.train_batch_size)
        loader = DataLoader(data, batch_size=args.train_batch_size, drop_last=True)
    return loader


@smp.step
def train_step(model, optimizer, input_ids, attention_mask, args):
    output = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)
    loss = output["loss"]
    model.backward(loss)
    if args.logits_output:
        return output, loss
    return loss


@smp.step
def test_step(model, input_ids, attention_mask):
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]


def eval_model(model, loader):
    model = model.eval()
    total = 0.0
    with torch.no_grad():
        for input_ids, attention_mask in loader:
            total += test_step(model, input_ids, attention_mask).reduce_mean().item()
    total = torch.tensor(total / len(loader))
    if smp.dp_size() > 1:
        dist.all_reduce(total, group=smp.get_dp_process_group())
        total = total / smp.dp_size()
    model.train()
    return total.item()


def train(model, optimizer, lr_scheduler, args, total_steps):
    loader = create_dataloader(args, 1234, args.max_steps * args.train_batch_size * smp.rdp_size())
    model.train()
    for index, (input_ids, attention_mask) in enumerate(loader):
        if index < total_steps:
            continue
        optimizer.zero_grad(set_to_none=True)
        if args.logits_output:
            output, loss_mb = train_step(model, optimizer, input_ids, attention_mask, args)
            logits = torch.cat(output["logits"].outputs)
            assert logits.shape == (args.train_batch_size, LENGTH, VOCABULARY), logits.shape
        else:
            loss_mb = train_step(model, optimizer, input_ids, attention_mask, args)
        norm = optimizer.clip_master_grads(args.grad_clip)
        if not args.scale:
            assert norm > 0
        optimizer.step()
        lr_scheduler.step()
        total_steps += 1
        loss = loss_mb.reduce_mean()
        loss_scalar = loss.item()  # on all ranks
        if smp.dp_size() > 1:
            dist.all_reduce(loss, group=smp.get_dp_process_group())
            loss_scalar = loss.item() / smp.dp_size()
        if smp.rank() == 0:
            print(
                f"step {total_steps} loss {loss_scalar:.6f} lr {lr_scheduler.get_last_lr()[0]:.6f}",
                flush=True,
            )
        if total_steps in args.checkpoint_steps:
            smp.save_checkpoint(
                args.checkpoint_dir,
                tag=f"total_steps{total_steps}",
                partial=True,
                model=model,
                optimizer=optimizer,
                user_content={"total_steps": total_steps, "lr_scheduler": lr_scheduler.state_dict()},
                num_kept_partial_checkpoints=args.num_kept_checkpoints,
            )
    return total_steps


def configuration():
    return GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=4,
        n_head=2,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipeline_parallel_degree", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--activation_checkpointing", type=int, default=0)
    parser.add_argument("--activation_strategy", default="each")
    parser.add_argument("--logits_output", type=int, default=0)
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--train_batch_size", type=int, default=4)
    parser.add_argument("--grad_clip", type=float, default=1.0)
    parser.add_argument("--scale", type=int, default=0)
    parser.add_argument("--manual", type=int, default=0)
    parser.add_argument("--checkpoint_dir")
    parser.add_argument("--checkpoint_steps", type=int, nargs="*", default=[])
    parser.add_argument("--num_kept_checkpoints", type=int, default=2)
    parser.add_argument("--load_partial", type=int, default=0)
    parser.add_argument("--load_full")
    parser.add_argument("--save_final_full_model")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    smp_config = {
        "ddp": True,
        "tensor_parallel_degree": 1,
        "pipeline_parallel_degree": args.pipeline_parallel_degree,
        "microbatches": args.microbatches,
        "shard_optimizer_state": False,
        "prescaled_batch": False,
        "fp16": False,
        "bf16": False,
        "offload_activations": False,
        "optimize": "speed",
        "auto_partition": not args.manual,
        "default_partition": 0,
    }
    smp.init(smp_config)
    torch.manual_seed(7)
    assert SMP_VERSION >= (1, 15)
    with smp.model_creation(tensor_parallelism=False, dtype=torch.get_default_dtype()):
        model = GPT2LMHeadModel(configuration())
    model = smp.DistributedModel(model, trace_device="gpu", backward_passes_per_step=1)
    m = model.get_module()
    if args.manual:
        for index, layer in enumerate(m.transformer.h):
            smp.set_partition(layer, index * smp.pp_size() // len(m.transformer.h))
    if args.activation_checkpointing:
        for layer in m.transformer.h.children():
            smp.set_activation_checkpointing(layer, strategy=args.activation_strategy)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.01
    )
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2},
    )
    lr_scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))

    def announce(model, optimizer):
        count = sum(parameter.numel() for parameter in model.local_parameters())
        print(rmsg(f"stage {smp.pp_rank()} has {count} parameters"), flush=True)

    model.register_post_partition_hook(announce)
    total_steps = 0
    if args.load_partial:
        user_content = smp.resume_from_checkpoint(args.checkpoint_dir, partial=True)
        total_steps = user_content["total_steps"]
        lr_scheduler.load_state_dict(user_content["lr_scheduler"])
    elif args.load_full:
        smp.resume_from_checkpoint(args.checkpoint_dir, tag=args.load_full, partial=False)
    total_steps = train(model, optimizer, lr_scheduler, args, total_steps)
    loss = eval_model(model, create_dataloader(args, 99, 2 * args.train_batch_size * smp.rdp_size()))
    if smp.rank() == 0:
        print(f"evaluation {loss:.6f}", flush=True)
    if args.save_final_full_model:
        if smp.rdp_rank() == 0:
            state_dict = model.state_dict(gather_to_rank0=True)
            if smp.rank() == 0:
                translated = translate_state_dict_to_hf_gpt2(state_dict, max_seq_len=LENGTH)
                smp.save({"model_state_dict": translated}, args.save_final_full_model, partial=False)
        smp.barrier()


if __name__ == "__main__":
    main()
