"""A script as users write it after the BERT pre-training example: LAMB, a GradScaler, partial files."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from transformers import BertConfig, BertForPreTraining

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.test.torch.utils import dump_model, verify
from smdistributed.modelparallel.torch.optimizers import FusedLAMB

VOCABULARY, LENGTH, MASK = 31, 10, 1


def is_main_process():
    return not smp.is_initialized() or smp.rank() == 0


class BertPretrainingCriterion(torch.nn.Module):
    def forward(self, prediction_scores, seq_relationship_score, masked_lm_labels, next_sentence_labels):
        masked = F.cross_entropy(
            prediction_scores.view(-1, VOCABULARY), masked_lm_labels.view(-1), ignore_index=-1
        )
        following = F.cross_entropy(seq_relationship_score.view(-1, 2), next_sentence_labels.view(-1))
        return masked + following


@smp.step
def smp_step(
    args,
    device,
    input_ids,
    segment_ids,
    input_mask,
    masked_lm_labels,
    next_sentence_labels,
    model,
    criterion,
    scaler,
):
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bool(args.autocast)):
        output = model(input_ids=input_ids, token_type_ids=segment_ids, attention_mask=input_mask)
        prediction_scores, seq_relationship_score = output[0], output[1]
        loss = criterion(
            prediction_scores.float(), seq_relationship_score.float(), masked_lm_labels, next_sentence_labels
        )
    if args.gradient_accumulation_steps > 1:
        loss = loss / args.gradient_accumulation_steps
    model.backward(scaler.scale(loss) if args.scaler else loss)
    return loss


def batches(count, size):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        first = torch.randint(2, VOCABULARY, (size, 1), generator=generator)
        input_ids = 2 + (first + torch.arange(LENGTH)) % (VOCABULARY - 2)
        masked = torch.rand(size, LENGTH, generator=generator) < 0.3
        labels = torch.where(masked, input_ids, torch.tensor(-1))
        following = torch.randint(2, (size,), generator=generator)
        segments = (torch.arange(LENGTH) >= LENGTH // 2).long().repeat(size, 1) * following[:, None]
        mask = torch.ones(size, LENGTH, dtype=torch.int64)
        mask[:, -1] = following
        yield torch.where(masked, torch.tensor(MASK), input_ids), segments, mask, labels, following


def configuration():
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def prepare_model_and_optimizer(args, device):
    torch.manual_seed(3)
    model = smp.DistributedModel(BertForPreTraining(configuration()))
    model.to(device)
    param_optimizer = list(model.named_parameters())
    no_decay = ["bias", "gamma", "beta", "LayerNorm"]
    grouped = [
        {
            "params": [p for n, p in param_optimizer if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.01,
        },
        {"params": [p for n, p in param_optimizer if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = smp.DistributedOptimizer(FusedLAMB(grouped, lr=args.learning_rate))
    scheduler = LambdaLR(optimizer, lambda step: max(0.1, 1 - step / 20))
    return model, optimizer, scheduler


def take_optimizer_step(args, optimizer, model, scheduler, scaler):
    if args.scaler:
        if len(list(model.local_parameters())) > 0:
            scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    for param in model.parameters():
        param.grad = None
    scheduler.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mp_parameters", default="")
    parser.add_argument("--output_dir", type=Path)
    parser.add_argument("--max_steps", type=int, default=4)
    parser.add_argument("--train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=0.02)
    parser.add_argument("--autocast", type=int, default=0)
    parser.add_argument("--scaler", type=int, default=1)
    parser.add_argument("--resume_step", type=int, default=0)
    parser.add_argument("--partial_checkpoint", type=int, default=1)
    parser.add_argument("--debug", action="store_true")
    args = parser.parse_args()
    smp.init()
    device = torch.device("cpu")
    model, optimizer, scheduler = prepare_model_and_optimizer(args, device)
    criterion = BertPretrainingCriterion()
    scaler = smp.amp.GradScaler(init_scale=1024.0)
    if args.resume_step:
        path = str(args.output_dir / f"ckpt_{args.resume_step}.pt")
        checkpoint = smp.load(path, partial=bool(args.partial_checkpoint), map_location="cpu")
        model.load_state_dict(checkpoint["model"], strict=False)
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        scaler.load_state_dict(checkpoint["scaler"])
    if args.debug:
        dump_model(model)
        verify(model, optimizer)

    model.train()
    saved = []
    for step, batch in enumerate(batches(args.max_steps, args.train_batch_size)):
        if step < args.resume_step:
            continue
        per_rank = args.train_batch_size // smp.dp_size()
        mine = [one[smp.dp_rank() * per_rank : (smp.dp_rank() + 1) * per_rank].to(device) for one in batch]
        loss_mb = smp_step(args, device, *mine, model, criterion, scaler)
        take_optimizer_step(args, optimizer, model, scheduler, scaler)
        loss = loss_mb.reduce_mean()
        torch.distributed.all_reduce(loss, group=smp.get_dp_process_group())
        if is_main_process():
            print(
                f"step {step + 1} loss {loss.item() / smp.dp_size():.6f} scale {scaler.get_scale()}",
                flush=True,
            )
        if args.output_dir is None:
            continue
        if smp.rdp_rank() == 0:
            path = str(args.output_dir / f"ckpt_{step + 1}.pt")
            others = {"scheduler": scheduler.state_dict(), "scaler": scaler.state_dict()}
            parts = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict(), **others}
            smp.save(parts, path, partial=True)
            whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **others}
            if smp.mp_rank() == 0:
                smp.save(whole, path, partial=False)
            saved.append(f"{path}_{smp.mp_rank()}")
            if len(saved) > 2:
                Path(saved.pop(0)).unlink()
        smp.barrier()


if __name__ == "__main__":
    main()
