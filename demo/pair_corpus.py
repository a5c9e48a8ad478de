# SPDX-License-Identifier: Apache-2.0
"""Corpus and tokenizer of the demo pair (see `train_pair.py` for provenance and licence)."""

from __future__ import annotations

import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pair_model as pm
import torch

HOLD_OUT_EVERY, HOLD_OUT_PHASE = 50, 7
CHAT_TEMPLATE = (
    "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n{% endif %}"
)


@dataclass
class Corpus:
    """Token ids of all training and all held-out files, each file closed by the end token."""

    train: torch.Tensor
    held: torch.Tensor
    held_names: list[str]


def load_corpus(path: Path, tokenizer_folder: Path, device: torch.device) -> Corpus:
    """Read the tar, train the tokenizer on its training files, save it and encode everything."""
    begin = time.time()
    train: list[tuple[str, str]] = []
    held: list[tuple[str, str]] = []
    with tarfile.open(path) as tar:
        members = sorted((m for m in tar.getmembers() if m.isfile()), key=lambda m: m.name)
        for number, member in enumerate(members):
            content = tar.extractfile(member)
            if content is None:
                raise ValueError(f"{path}: {member.name} cannot be read")
            part = held if number % HOLD_OUT_EVERY == HOLD_OUT_PHASE else train
            part.append((member.name, content.read().decode("utf-8", "ignore")))
    tokenizer = train_tokenizer([text for _, text in train], tokenizer_folder)

    def encode(files: list[tuple[str, str]]) -> torch.Tensor:
        encoded = tokenizer.encode_batch([text for _, text in files])
        ids = [token for one in encoded for token in (*one.ids, pm.EOS)]
        return torch.tensor(ids, dtype=torch.long, device=device)

    corpus = Corpus(encode(train), encode(held), [name for name, _ in held])
    print(
        f"corpus: {len(train)} files {corpus.train.numel() / 1e6:.2f} M tokens, held out "
        f"{len(held)} files {corpus.held.numel() / 1e6:.2f} M; {time.time() - begin:.0f} s",
        flush=True,
    )
    return corpus


def train_tokenizer(texts: list[str], folder: Path) -> Any:
    """Byte-level BPE with the special tokens EOS, PAD and MASK; saved with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=pm.VOCAB,
        special_tokens=["<|endoftext|>", "<|pad|>", "<|mask|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        model_max_length=pm.MAX_POSITION,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return tokenizer
