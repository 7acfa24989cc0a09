"""A pre-training script with the flags of those of 2022 and 2023, for five families of language models.

It is run as a script, and by ranks of a pool, which call ``main`` with the words of a command line. As a
script it takes several such lines with ``--then`` between them: starting it takes longer than training.
"""

import argparse
import math
import os
import random
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    FalconConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    T5Config,
)

import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (
    translate_hf_state_dict_to_smdistributed_gpt2,
    translate_state_dict_to_hf_gpt2,
)
from smdistributed.modelparallel.torch.nn.huggingface.gptj import (
    translate_hf_gptj_state_dict_to_smdistributed,
    translate_state_dict_to_hf_gptj,
)

VOCABULARY, LENGTH = 40, 12
TRANSLATIONS = {
    "gpt2": (translate_state_dict_to_hf_gpt2, translate_hf_state_dict_to_smdistributed_gpt2),
    "gptj": (translate_state_dict_to_hf_gptj, translate_hf_gptj_state_dict_to_smdistributed),
}


def model_config(args):
    sizes = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    causal = {"n_positions": LENGTH, "n_embd": 16, "n_layer": args.num_layers, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    body = {"hidden_size": 16, "num_hidden_layers": args.num_layers, "num_attention_heads": 2}
    if args.model_type == "gpt2":
        return GPT2Config(**sizes, **causal, **dropout)
    if args.model_type == "gptj":
        return GPTJConfig(**sizes, **causal, **dropout, rotary_dim=4)
    if args.model_type == "gpt_neox":
        return GPTNeoXConfig(**sizes, **body, intermediate_size=32, max_position_embeddings=LENGTH)
    if args.model_type == "falcon":
        return FalconConfig(**sizes, **body, alibi=args.use_alibi > 0, new_decoder_architecture=False)
    layers = {"num_layers": args.num_layers, "num_decoder_layers": args.num_layers}
    shapes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "dropout_rate": 0.0}
    return T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, use_cache=False, **layers, **shapes)


def layers_of(model):
    """What is checkpointed, wherever the family has it."""
    module = model.get_module()
    if hasattr(module, "encoder") and hasattr(module, "decoder"):
        return [*module.encoder.block, *module.decoder.block]
    body = getattr(module, "transformer", None) or module.gpt_neox
    return getattr(body, "seq_layers", None) or getattr(body, "h", None) or body.layers


def learnable_data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCABULARY, (count, 1), generator=generator)
    ids = (start + torch.arange(LENGTH)) % VOCABULARY
    return TensorDataset(ids, torch.ones_like(ids))


def batches(args, seed, steps):
    size = args.train_batch_size
    if args.prescaled_batch:
        rank, ranks = smp.rdp_rank(), smp.rdp_size()
    else:
        rank, ranks = smp.dp_rank(), smp.dp_size()
    data = learnable_data(steps * size * args.replicas_of_batch, seed)
    per_rank = size * args.replicas_of_batch // ranks  # the whole job's batch is the same at all degrees
    sampler = torch.utils.data.DistributedSampler(data, ranks, rank, shuffle=False, drop_last=True)
    return DataLoader(data, sampler=sampler, batch_size=per_rank, drop_last=True)


def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@smp.step
def train_step(model, optimizer, input_ids, attention_mask, args):
    if args.logits_output:
        output = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)
        loss = output["loss"]
    else:
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return (output, loss) if args.logits_output else loss


@smp.step
def test_step(model, input_ids, attention_mask):
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]


def eval_model(model, args):
    model.eval()
    losses = []
    with torch.no_grad():
        for input_ids, attention_mask in batches(args, 99, 2):
            input_ids, attention_mask = input_ids.to(device()), attention_mask.to(device())
            losses.append(test_step(model, input_ids, attention_mask).reduce_mean())
    loss = torch.stack(losses).mean()
    if smp.dp_size() > 1:
        dist.all_reduce(loss, group=smp.get_dp_process_group())
        loss /= smp.dp_size()
    model.train()
    return loss.item()


def param_groups(model):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]


def num_params(args, model):
    if args.sharded_data_parallel_degree > 1:
        return sum(np.prod(parameter.ds_shape) for parameter in model.local_parameters())
    return sum(parameter.numel() for parameter in model.local_parameters())


def check_shards(args, optimizer):
    """Each parameter's part is a piece of the flat FP32 memory of its group: converters count on that."""
    assert dist.get_world_size(optimizer.ds_param_shard_group) == args.sharded_data_parallel_degree
    for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        first = 0
        for parameter in group:
            part = parameter.ds_tensor
            assert math.prod(parameter.ds_shape) == parameter.ds_numel >= part.ds_numel
            master = flat.narrow(0, first, part.ds_numel)
            assert torch.equal(master.to(part.dtype), part.data)
            first += part.ds_numel
        assert first == flat.numel()


def save(args, model, optimizer, scheduler, config, total_steps):
    content = {
        "cli_args": vars(args),
        "num_params": np.int64(num_params(args, model)),
        "total_steps": total_steps,
        "model_config": config,
        "lr_scheduler": scheduler.state_dict(),
    }
    for partial in (True, False) if args.save_full_too else (True,):
        smp.save_checkpoint(
            args.checkpoint_dir,
            tag=f"{'trained' if partial else 'full'}_gpt_nparams-{total_steps}",
            partial=partial,
            model=model,
            optimizer=optimizer,
            user_content=content,
            num_kept_partial_checkpoints=args.num_kept_checkpoints if partial else None,
            **({"blocking": False} if args.save_in_background else {}),
        )


def train(args, model, optimizer, scheduler, config, total_steps):
    model.train()
    losses, norms = [], []
    for index, (input_ids, attention_mask) in enumerate(batches(args, args.seed, args.max_steps)):
        if index < total_steps:
            continue
        started = time.time()
        input_ids, attention_mask = input_ids.to(device()), attention_mask.to(device())
        optimizer.zero_grad(set_to_none=True)
        result = train_step(model, optimizer, input_ids, attention_mask, args)
        if args.logits_output:
            output, loss_mb = result
            assert torch.cat(output["logits"].outputs).shape[-1] == VOCABULARY
        else:
            loss_mb = result
        if args.sharded_data_parallel_degree > 1:
            optimizer.step()
            check_shards(args, optimizer)
            norms.append(float(optimizer._global_grad_norm))
        else:
            norms.append(optimizer.clip_master_grads(args.grad_clip))
            optimizer.step()
        if not (args.fp16 and optimizer.overflow):
            scheduler.step()
        total_steps += 1
        loss = loss_mb.reduce_mean()
        if smp.dp_size() > 1:
            dist.all_reduce(loss, group=smp.get_dp_process_group())
            loss /= smp.dp_size()
        losses.append(loss.item())
        if smp.rank() == 0 and index % args.logging_freq == 0:
            took = time.time() - started
            rate = scheduler.get_last_lr()[0]
            found = f"Loss: {losses[-1]:.6f}, norm {norms[-1]}, lr {rate}"
            print(f"({took:.1f}s), Batch {total_steps - 1} {found}")
        if args.checkpoint_freq and total_steps % args.checkpoint_freq == 0:
            save(args, model, optimizer, scheduler, config, total_steps)
    return losses, norms, total_steps


def parse(words):
    parser = argparse.ArgumentParser()
    for name, default in {
        "pipeline_parallel_degree": 1, "tensor_parallel_degree": 1, "sharded_data_parallel_degree": 1,
        "microbatches": 1, "fp16": 0, "bf16": 0, "shard_optimizer_state": 0, "prescaled_batch": 0,
        "offload_activations": 0, "activation_loading_horizon": 4, "activation_checkpointing": 0,
        "skip_tracing": 0, "delayed_param": 0, "use_distributed_transformer": 1, "flash_attention": 0,
        "distribute_embedding": 0, "attention_in_fp32": 0, "query_key_layer_scaling": 0, "fused_softmax": 0,
        "fused_dropout": 0, "fused_bias_gelu": 0, "residual_addition_in_fp32": 0, "use_alibi": 0,
        "zero_init": 0, "manual_partition": 0, "match_weights": 0, "logits_output": 0, "num_layers": 2,
        "max_steps": 6, "train_batch_size": 4, "replicas_of_batch": 4, "gradient_accumulation": 1,
        "logging_freq": 1, "checkpoint_freq": 0, "num_kept_checkpoints": 2, "load_partial": 0, "load_full": 0,
        "save_final_full_model": 0, "save_full_too": 0, "save_in_background": 0,
        "seed": 12, "same_seed": 1, "warmup_steps": 2,
        "sdp_reduce_bucket_size": 500_000_000, "sdp_param_persistence_threshold": 1_000_000,
        "sdp_max_live_parameters": 1_000_000_000, "sdp_hierarchical_allgather": 1, "clean_cache": 0,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in {"grad_clip": 1.0, "lr": 0.01, "sdp_gradient_clipping": 1.0}.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--model_type", default="gpt2")
    parser.add_argument("--activation_strategy", default="each")
    parser.add_argument("--placement_strategy", default="cluster")
    parser.add_argument("--optimize", default="speed")
    parser.add_argument("--checkpoint_dir", "--checkpoint-dir", default=None)
    parser.add_argument("--model_dir", "--model-dir", default=os.environ.get("SM_MODEL_DIR"))
    parser.add_argument("--load_tag", default=None)
    parser.add_argument("--mp_parameters", default="")
    return parser.parse_known_args(words)[0]


def smp_config(args):
    config = {
        "ddp": True,
        "tensor_parallel_degree": args.tensor_parallel_degree,
        "pipeline_parallel_degree": args.pipeline_parallel_degree,
        "microbatches": args.microbatches,
        "shard_optimizer_state": args.shard_optimizer_state > 0,
        "prescaled_batch": args.prescaled_batch > 0,
        "fp16": args.fp16 > 0,
        "bf16": args.bf16 > 0,
        "offload_activations": args.offload_activations > 0,
        "delayed_parameter_initialization": args.delayed_param > 0,
        "optimize": args.optimize,
        "placement_strategy": args.placement_strategy,
        "activation_loading_horizon": args.activation_loading_horizon,
        "skip_tracing": args.skip_tracing > 0,
    }
    if args.sharded_data_parallel_degree > 1:
        config["sharded_data_parallel_degree"] = args.sharded_data_parallel_degree
        config["sdp_reduce_bucket_size"] = args.sdp_reduce_bucket_size
        config["sdp_param_persistence_threshold"] = args.sdp_param_persistence_threshold
        config["sdp_max_live_parameters"] = args.sdp_max_live_parameters
        config["sdp_hierarchical_allgather"] = args.sdp_hierarchical_allgather > 0
        config["sdp_gradient_clipping"] = args.grad_clip
    if args.manual_partition:
        config["auto_partition"], config["default_partition"] = False, 0
    return config


def make_model(args, config):
    distributed = args.use_distributed_transformer > 0 and args.model_type in TRANSLATIONS
    keywords = {
        "zero_init": args.zero_init == 1 or not distributed,
        "flash_attention": args.flash_attention > 0,
        "distribute_embedding": args.distribute_embedding > 0,
        "attention_in_fp32": args.attention_in_fp32 > 0,
        "query_key_layer_scaling": args.query_key_layer_scaling > 0,
        "fused_softmax": args.fused_softmax > 0,
        "fused_dropout": args.fused_dropout > 0,
        "fused_bias_gelu": args.fused_bias_gelu > 0,
        "fp32_residual_addition": args.residual_addition_in_fp32 > 0,
        "use_alibi": args.use_alibi > 0,
    }
    dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.get_default_dtype()
    with smp.model_creation(tensor_parallelism=distributed, dtype=dtype, **keywords):
        kind = AutoModelForSeq2SeqLM if args.model_type == "t5" else AutoModelForCausalLM
        return kind.from_config(config)


def main(words=None):
    args = parse(words)
    smp.shutdown()  # ranks of a pool have run another recipe before
    smp.init(smp_config(args))
    assert tuple(map(int, smdistributed.modelparallel.__version__.split(".")[:2])) >= (1, 15)
    seed = args.seed if args.same_seed else args.seed + smp.dp_rank()
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    config = model_config(args)
    model = smp.DistributedModel(
        make_model(args, config), trace_device="gpu", backward_passes_per_step=args.gradient_accumulation
    )
    layers = layers_of(model)
    if args.manual_partition:
        for index, layer in enumerate(layers):
            smp.set_partition(layer, index * smp.pp_size() // len(layers))
    if args.activation_checkpointing:
        whole = args.model_type in TRANSLATIONS and args.use_distributed_transformer
        if whole and args.activation_strategy != "each":
            smp.set_activation_checkpointing(
                layers, pack_args_as_tuple=True, strategy=args.activation_strategy
            )
        else:
            for layer in layers:
                parts = [layer.attention, layer.output] if whole else [layer]
                for part in parts:
                    smp.set_activation_checkpointing(part)
    optimizer = torch.optim.AdamW(param_groups(model), lr=args.lr, betas=(0.9, 0.95))
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2, "init_scale": 2.0**12},
    )
    scheduler = LambdaLR(
        optimizer.optimizer if args.fp16 else optimizer,
        lambda step: min(1.0, (step + 1) / args.warmup_steps) * (0.5 + 0.5 * math.cos(step / 50)),
    )
    model.register_post_partition_hook(lambda model, optimizer: smp.barrier())
    total_steps = 0
    if args.load_partial or args.load_full:
        to_smp = TRANSLATIONS.get(args.model_type, (None, None))[1]
        content = smp.resume_from_checkpoint(
            args.checkpoint_dir,
            tag=args.load_tag,
            partial=args.load_partial > 0,
            strict=True,
            translate_function=to_smp if args.load_full and args.use_distributed_transformer else None,
        )
        if content is not None:
            total_steps = content["total_steps"]
            scheduler.load_state_dict(content["lr_scheduler"])
            assert AutoConfig.for_model(**content["model_config"].to_dict()).vocab_size == VOCABULARY
    losses, norms, total_steps = train(args, model, optimizer, scheduler, config, total_steps)
    evaluation = eval_model(model, args)
    if args.save_final_full_model:
        smp.save_checkpoint(
            args.model_dir,
            tag="fullmodel.pt",
            partial=False,
            model=model,
            user_content={
                "total_steps": total_steps,
                "lr_scheduler": scheduler.state_dict(),
                "model_config": config,
            },
        )
    smp.barrier()
    if smp.rank() == 0:
        print(f"SMP training finished successfully, evaluation {evaluation:.6f}")
    return losses, norms, evaluation


def command_lines(words):
    lines = [[]]
    for word in words:
        if word == "--then":
            lines.append([])
        else:
            lines[-1].append(word)
    return lines


if __name__ == "__main__":
    for line in command_lines(sys.argv[1:]):
        main(line)
