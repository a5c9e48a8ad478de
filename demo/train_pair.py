# SPDX-License-Identifier: Apache-2.0
"""Train the demo pair from scratch: a small Qwen3-architecture target and a DSpark drafter for it.

Corpus: the Python source of the CPython 3.13 standard library (licence PSF-2.0), tokenised with a
byte-level BPE trained on the same text; every 50th file is held out. It is a tar of the library's
`*.py` files, made in its `Lib` folder with

    find . -name '*.py' -not -path './site-packages/*' -not -path './lib2to3/*' |
      sort | tar cJf corpus.tar.xz -T -

Three stages, a few minutes on one GPU: the target by next-token prediction; rollouts, text that the
target writes itself at temperatures 0, 0.5 and 1; the drafter on rollouts and corpus, with the loss
of arXiv 2607.05147 (cross-entropy, total variation, confidence against 1 - total variation).

Output in OUT: `target/` and `draft/`, both Hugging Face checkpoints that vLLM loads.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import pair_model as pm
import torch
import torch.nn as nn
import torch.nn.functional as F
from pair_corpus import Corpus, load_corpus
from safetensors.torch import save_file

ROLLOUT_TOKENS, ROLLOUT_PROMPT_TOKENS, ROLLOUT_BATCH = 512, 64, 1024
TARGET_BATCH, TARGET_RATE = 96, 3e-3
DRAFT_BATCH, DRAFT_RATE, ANCHORS = 24, 2e-3, 64
# Later slots of a block are reached less often.
SLOT_DECAY = 4.0


def optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.05},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def set_rate(optim: torch.optim.Optimizer, base: float, done: float) -> None:
    """Warm-up over the first 3 %, then a cosine down to 2 % of `base`; `done` in [0, 1]."""
    cosine = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * min(1.0, done))).item())
    for group in optim.param_groups:
        group["lr"] = base * min(1.0, done / 0.03) * (0.02 + 0.98 * cosine)


def step(model: nn.Module, optim: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optim.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()


def windows(data: torch.Tensor, count: int) -> torch.Tensor:
    """Random windows of the corpus, [count, CONTEXT + 1]."""
    start = torch.randint(0, data.numel() - pm.CONTEXT - 1, (count,), device=data.device)
    return data[start[:, None] + torch.arange(pm.CONTEXT + 1, device=data.device)[None]]


def next_token_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1]).float()
    return F.cross_entropy(logits.view(-1, pm.VOCAB), ids[:, 1:].reshape(-1))


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16)


def train_target(corpus: Corpus, device: torch.device, steps: int) -> pm.Target:
    """Target in bfloat16, frozen."""
    target = pm.Target().to(device)
    pm.initialise(target)
    print("target params", sum(p.numel() for p in target.parameters()) / 1e6)
    optim, compiled, begin = optimizer(target, TARGET_RATE), torch.compile(target), time.time()
    for number in range(1, steps + 1):
        with autocast(device):
            loss = next_token_loss(compiled, windows(corpus.train, TARGET_BATCH))
        step(target, optim, loss)
        set_rate(optim, TARGET_RATE, number / steps)
        if number % 100 == 0:
            held = held_out_loss(target, corpus.held, batches=4)
            seconds = time.time() - begin
            print(
                f"target step {number} loss {loss.item():.3f} held-out {held:.3f} {seconds:.0f} s",
                flush=True,
            )
    target.eval()
    print(f"target steps {steps}, held-out loss {held_out_loss(target, corpus.held, 40):.3f}")
    return target.to(torch.bfloat16).requires_grad_(False)


@torch.no_grad()
def held_out_loss(target: nn.Module, data: torch.Tensor, batches: int) -> float:
    with autocast(data.device):
        losses = [next_token_loss(target, windows(data, 16)).item() for _ in range(batches)]
    return sum(losses) / len(losses)


def make_rollouts(target: pm.Target, data: torch.Tensor, seconds: float) -> torch.Tensor:
    """Text of the target's own, [rollouts, ROLLOUT_TOKENS]; at least two batches."""
    temperatures = torch.tensor([0.0, 0.0, 0.5, 1.0], device=data.device).repeat(ROLLOUT_BATCH // 4)
    offsets = torch.arange(ROLLOUT_PROMPT_TOKENS, device=data.device)
    texts: list[torch.Tensor] = []
    begin = time.time()
    while time.time() - begin < seconds or len(texts) < 2:
        last = data.numel() - ROLLOUT_PROMPT_TOKENS
        start = torch.randint(0, last, (ROLLOUT_BATCH,), device=data.device)
        prompts = data[start[:, None] + offsets]
        with autocast(data.device):
            new = ROLLOUT_TOKENS - ROLLOUT_PROMPT_TOKENS
            texts.append(pm.rollout(target, prompts, new, temperatures))
    rollouts = torch.cat(texts)
    print(f"rollouts {rollouts.numel() / 1e6:.1f} M tokens in {time.time() - begin:.0f} s")
    return rollouts


@dataclass
class Block:
    """One drafter batch: the loss, and per slot [batch, anchors, block] what it learned."""

    loss: torch.Tensor
    acceptance: torch.Tensor
    confidence: torch.Tensor
    greedy_match: torch.Tensor


def draft_block(target: pm.Target, draft: nn.Module, ids: torch.Tensor, anchors: int) -> Block:
    """Draft blocks at random anchors of `ids` [batch, tokens] and score them.

    Every block sees the target's features strictly before its anchor, and itself.
    """
    batch, tokens = ids.shape
    device, block = ids.device, pm.BLOCK
    with torch.no_grad():
        logits, features = target.with_taps(ids)
    anchor = torch.rand(batch, tokens - block - 1, device=device).argsort(1)[:, :anchors]
    offset = torch.arange(block, device=device)
    position = (anchor[..., None] + offset).reshape(batch, -1)
    inputs = torch.full((batch, anchors, block), pm.MASK, device=device)
    inputs[..., 0] = ids.gather(1, anchor)
    embedded = target.model.embed_tokens(inputs.reshape(batch, -1)).detach()

    owner = torch.arange(anchors * block, device=device) // block
    sees_context = torch.arange(tokens, device=device)[None, None] < anchor[:, owner][..., None]
    sees_block = (owner[:, None] == owner[None, :])[None].expand(batch, -1, -1)
    mask = torch.cat([sees_context, sees_block], -1)[:, None]
    context_position = torch.arange(tokens, device=device)[None].expand(batch, -1)
    hidden = draft(embedded, features.detach(), position, context_position, mask)

    label_index = (anchor[..., None] + 1 + offset).reshape(batch, -1)
    labels, previous = ids.gather(1, label_index), ids.gather(1, label_index - 1)
    markov = draft.markov_head.markov_w1(previous)
    draft_logits = F.linear(hidden, target.lm_head.weight.detach())
    draft_logits = draft_logits + draft.markov_head.markov_w2(markov)
    target_logits = logits.gather(1, (label_index - 1)[..., None].expand(-1, -1, pm.VOCAB))
    confidence = draft.confidence_head.proj(torch.cat([hidden, markov], -1)).squeeze(-1).float()

    p, q = target_logits.float().softmax(-1), draft_logits.float().softmax(-1)
    variation = 0.5 * (p - q).abs().sum(-1)
    acceptance = (1 - variation).detach().clamp(0, 1)
    weight = torch.exp(-offset.float() / SLOT_DECAY).repeat(anchors)[None].expand_as(variation)
    entropy = F.cross_entropy(
        draft_logits.float().reshape(-1, pm.VOCAB), labels.reshape(-1), reduction="none"
    ).view_as(variation)
    doubt = F.binary_cross_entropy_with_logits(confidence, acceptance, reduction="none")
    loss = ((0.1 * entropy + 0.9 * 2 * variation + doubt) * weight).sum() / weight.sum()
    match = (target_logits.argmax(-1) == draft_logits.argmax(-1)).float()
    shape = (batch, anchors, block)
    return Block(
        loss, acceptance.view(shape), confidence.sigmoid().detach().view(shape), match.view(shape)
    )


def train_draft(
    target: pm.Target, rollouts: torch.Tensor, data: torch.Tensor, seconds: float
) -> tuple[pm.Draft, int]:
    """Drafter in bfloat16 (confidence head in float32) and the number of steps it took."""
    draft = pm.Draft().to(data.device)
    pm.initialise(draft)
    print("draft params", sum(p.numel() for p in draft.parameters()) / 1e6)
    optim, compiled = optimizer(draft, DRAFT_RATE), torch.compile(draft)
    begin, number = time.time(), 0
    while (elapsed := time.time() - begin) <= seconds or number == 0:
        # One batch in four is corpus text, in windows twice as long.
        if number % 4 == 3:
            ids, anchors = windows(data, DRAFT_BATCH), ANCHORS
        else:
            row = torch.randint(0, rollouts.shape[0], (2 * DRAFT_BATCH,), device=data.device)
            ids, anchors = rollouts[row], ANCHORS // 2
        with autocast(data.device):
            block = draft_block(target, compiled, ids, anchors)
        step(draft, optim, block.loss)
        number += 1
        set_rate(optim, DRAFT_RATE, elapsed / seconds)
        if number % 200 == 0:
            tau = 1 + block.acceptance.cumprod(-1).sum(-1).mean().item()
            print(
                f"draft step {number} loss {block.loss.item():.3f} tau {tau:.2f} {elapsed:.0f} s",
                flush=True,
            )
    draft = draft.to(torch.bfloat16)
    draft.confidence_head.float()
    return draft, number


@torch.no_grad()
def evaluate(
    target: pm.Target, draft: pm.Draft, rollouts: torch.Tensor, steps: int
) -> dict[str, object]:
    """Report on rollouts that the drafter has not seen."""
    blocks = []
    with autocast(rollouts.device):
        for _ in range(20):
            row = torch.randint(0, rollouts.shape[0], (32,), device=rollouts.device)
            blocks.append(draft_block(target, draft, rollouts[row], ANCHORS // 2))
    accept = torch.cat([b.acceptance for b in blocks]).flatten(0, 1)
    confidence = torch.cat([b.confidence for b in blocks]).flatten(0, 1)
    match = torch.cat([b.greedy_match for b in blocks]).flatten(0, 1)
    return {
        "draft_steps": steps,
        "tau_sampled_rollouts": 1 + accept.cumprod(-1).sum(-1).mean().item(),
        "tau_greedy_teacher_forced": 1 + match.cumprod(-1).sum(-1).mean().item(),
        "accept_by_pos": accept.mean(0).tolist(),
        "conf_by_pos": confidence.mean(0).tolist(),
        "greedy_match_by_pos": match.mean(0).tolist(),
        "conf_mae": (confidence - accept).abs().mean().item(),
    }


def save_checkpoint(model: nn.Module, folder: Path, config: dict[str, object]) -> None:
    """Weights in bfloat16, the confidence head in float32."""
    weights = {
        name: value.to(torch.float32 if name.startswith("confidence_head") else torch.bfloat16)
        .cpu()
        .contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo pair from scratch.")
    parser.add_argument("corpus", type=Path, help="tar of Python files")
    parser.add_argument("out", type=Path, help="folder for target/ and draft/")
    parser.add_argument("--target-steps", type=int, default=900)
    parser.add_argument("--rollout-seconds", type=float, default=60)
    parser.add_argument("--draft-seconds", type=float, default=250)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()

    torch.manual_seed(1234)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device(args.device)
    for name in ("target", "draft"):
        (args.out / name).mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(args.corpus, args.out / "target", device)
    target = train_target(corpus, device, args.target_steps)
    rollouts = make_rollouts(target, corpus.train, args.rollout_seconds)
    unseen, seen = rollouts[-ROLLOUT_BATCH:], rollouts[:-ROLLOUT_BATCH]
    draft, steps = train_draft(target, seen, corpus.train, args.draft_seconds)
    report = evaluate(target, draft, unseen, steps)
    print(json.dumps(report))

    save_checkpoint(target, args.out / "target", pm.target_config())
    save_checkpoint(draft, args.out / "draft", pm.draft_config(ANCHORS))
    end = {"eos_token_id": pm.EOS, "pad_token_id": pm.PAD, "do_sample": False}
    write_json(args.out / "target" / "generation_config.json", end)
    write_json(args.out / "draft" / "training_report.json", report)
    (args.out / "heldout_files.txt").write_text("\n".join(corpus.held_names), encoding="utf-8")


if __name__ == "__main__":
    main()
