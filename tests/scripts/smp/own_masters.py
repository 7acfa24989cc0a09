"""A training script as users wrote it in 2022: distributed modules of 16 bits, and FP32 copies of its own."""

import argparse

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2Config, GPT2LMHeadModel

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import translate_state_dict_to_hf_gpt2
from smdistributed.modelparallel.torch.state_mod import state as smp_state
from smdistributed.modelparallel.torch.utils import get_distribution_axis, rmsg

VOCABULARY, LENGTH, WIDTH, ROWS = 40, 12, 64, 8


class MasterOptimizer:
    """Trains FP32 copies of this rank's parameters, as scripts did before the library had ``fp16``."""

    def __init__(self, model, optimizer, scale):
        self.model, self.optimizer, self.scale, self.overflow = model, optimizer, scale, False
        self.masters = {}  # by the optimizer's numbers, with the parameters

    def init_master_params(self):
        numbers = smp_state.param_name_to_index_tp_group[smp.tp_rank()]
        names = {id(parameter): name for name, parameter in self.model.local_named_parameters()}
        for group in self.optimizer.param_groups:
            for position, parameter in enumerate(group["params"]):
                master = torch.nn.Parameter(parameter.detach().float())
                self.masters[numbers[names[id(parameter)]]] = (parameter, master)
                group["params"][position] = master

    def backward(self, loss):
        self.model.backward(loss.float() * self.scale)

    def zero_grad(self):
        for parameter, master in self.masters.values():
            parameter.grad = master.grad = None

    def update_master_grads(self):
        for parameter, master in self.masters.values():
            master.grad = parameter.grad.float() / self.scale
        found = torch.tensor([0.0 if self._finite() else 1.0])
        dist.all_reduce(found, group=smp.get_world_process_group())
        self.overflow = bool(found)
        if self.overflow:
            self.scale /= 2

    def _finite(self):
        return all(bool(master.grad.isfinite().all()) for _, master in self.masters.values())

    def clip_master_grads(self, max_norm):
        squares = torch.zeros(1)
        for parameter, master in self.masters.values():
            if get_distribution_axis(parameter) is not None or smp.tp_rank() == 0:  # whole ones count once
                squares += master.grad.square().sum()
        dist.all_reduce(squares, group=smp.get_mp_process_group())
        norm = float(squares.sqrt())
        for _, master in self.masters.values():
            master.grad *= min(1.0, max_norm / (norm + 1e-6))
        return norm

    def step(self):
        if self.overflow:
            return
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in self.masters.values():
                parameter.copy_(master)

    def local_state_dict(self):
        entries = {
            number: {"master": master.detach(), **self.optimizer.state[master]}
            for number, (_, master) in self.masters.items()
        }
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return {"state": entries, "scale": self.scale, "rates": rates}

    def load_state_dict(self, given):
        self.scale = given["scale"]
        for group, rate in zip(self.optimizer.param_groups, given["rates"], strict=True):
            group["lr"] = rate
        for number, (parameter, master) in self.masters.items():
            entries = dict(given["state"][number])
            master.data.copy_(entries.pop("master"))
            parameter.data.copy_(master)
            self.optimizer.state[master] = entries

    def whole_masters(self):
        """On the first rank of the replica: all masters by name, put together over the others' slices."""
        names = smp_state.param_index_to_name_tp_group[smp.tp_rank()]
        mine = {
            names[number]: (get_distribution_axis(parameter), master.detach())
            for number, (parameter, master) in self.masters.items()
        }
        every = smp.allgather(mine, smp.TP_GROUP)
        whole = {
            name: value if axis is None else torch.cat([each[name][1] for each in every], axis)
            for name, (axis, value) in mine.items()
        }
        if smp.tp_rank() > 0:
            return None
        if smp.pp_rank() > 0:
            smp.send(whole, 0, smp.RankType.PP_RANK)
            return None
        for stage in range(1, smp.pp_size()):
            whole.update(smp.recv_from(stage, smp.RankType.PP_RANK))
        return whole


def batch(step):
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (ROWS, 1), generator=generator)
    return (start + torch.arange(LENGTH)) % VOCABULARY


def configuration():
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    none = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    return GPT2Config(**sizes, **none, use_cache=False, bos_token_id=0, eos_token_id=0)


@smp.step
def train_step(model, optimizer, input_ids, attention_mask):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    optimizer.backward(loss)
    return loss


def average(loss):
    if smp.dp_size() > 1:
        dist.all_reduce(loss, group=smp.get_dp_process_group())
        loss = loss / smp.dp_size()
    return loss.item()


def same_on_all_replicas(value):
    """The first replica tells the others."""
    if smp.rdp_rank() == 0:
        for replica in range(1, smp.rdp_size()):
            smp.send(value, replica, smp.RankType.RDP_RANK)
        return value
    return smp.recv_from(0, smp.RankType.RDP_RANK)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor_parallel_degree", type=int, default=2)
    parser.add_argument("--pipeline_parallel_degree", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--delayed_param", type=int, default=0)
    parser.add_argument("--activation_checkpointing", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--checkpoint_dir", default=None)
    parser.add_argument("--save_at", type=int, default=0)
    parser.add_argument("--load_from", type=int, default=0)
    parser.add_argument("--full", default=None)
    args = parser.parse_args()

    smp.init(
        {
            "ddp": True,
            "tensor_parallel_degree": args.tensor_parallel_degree,
            "pipeline_parallel_degree": args.pipeline_parallel_degree,
            "microbatches": args.microbatches,
            "prescaled_batch": True,
            "fp16_params": True,
            "optimize": "speed",
        }
    )
    torch.manual_seed(7)
    with (
        smp.tensor_parallelism(enabled=smp.tp_size() > 1, attention_in_fp32=True, fused_softmax=True),
        smp.delay_param_initialization(enabled=args.delayed_param > 0),
    ):
        model = GPT2LMHeadModel(configuration())
    model = smp.DistributedModel(model, trace_device="cpu")
    if args.activation_checkpointing:
        layers = model.get_module().transformer.seq_layers
        smp.set_activation_checkpointing(layers, pack_args_as_tuple=True, strategy="each")
    inner = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    scheduler = LambdaLR(inner, lambda step: min(1.0, (step + 1) / 3))
    optimizer = MasterOptimizer(model, inner, scale=2.0**10)
    model.register_post_partition_hook(lambda model, _: optimizer.init_master_params())
    path = f"{args.checkpoint_dir}/step"
    if args.load_from:
        content = smp.load(f"{path}{args.load_from}.pt", partial=True)
        model.load_state_dict(content["model"], same_partition_load=True)
        scheduler.load_state_dict(content["scheduler"])
        model.register_post_step_hook(lambda model, _: optimizer.load_state_dict(content["optimizer"]))

    for step in range(args.load_from, args.max_steps):
        ids = batch(step).chunk(smp.rdp_size())[smp.rdp_rank()]
        optimizer.zero_grad()
        loss_mb = train_step(model, optimizer, ids, torch.ones_like(ids))
        assert torch.equal(loss_mb.stack(), loss_mb.concat())  # losses have no axis
        optimizer.update_master_grads()
        norm = optimizer.clip_master_grads(1.0)
        optimizer.step()
        scheduler.step()
        loss = same_on_all_replicas(average(loss_mb.reduce_mean()))
        if smp.rank() == 0:
            print(f"step {step + 1} loss {loss:.6f} norm {norm:.6f}", flush=True)
        if args.save_at == step + 1:
            if smp.rdp_rank() == 0:
                content = {
                    "model": model.local_state_dict(),
                    "optimizer": optimizer.local_state_dict(),
                    "scheduler": scheduler.state_dict(),
                }
                smp.save(content, f"{path}{step + 1}.pt", partial=True)
            smp.barrier()
    if smp.get_tp_group()[0] == smp.rank():
        print(rmsg(f"{smp.size()} ranks; stage {smp.pp_rank()} has {len(optimizer.masters)} tensors"))
    if args.full and smp.rdp_rank() == 0:
        whole = optimizer.whole_masters()
        if whole is not None:
            whole["lm_head.weight"] = whole["word_embedding.weight"]  # one parameter, which has one number
            torch.save(translate_state_dict_to_hf_gpt2(whole, max_seq_len=LENGTH), args.full)
    smp.barrier()


if __name__ == "__main__":
    main()
