# SPDX-License-Identifier: Apache-2.0
"""Which part of a step a kernel belongs to, told from its name and its place in the step.

A step launches its parts in one order: inputs, target forward, LM head, acceptance, the draft's
context, its backbone, its LM head, the Markov loop, confidences, results. Kernels of one name occur
in several of them, so the parts are told apart by the kernels at their edges.
"""

import re
from collections.abc import Sequence

PARTS = (
    "inputs",
    "target forward",
    "target LM head",
    "acceptance",
    "draft context",
    "draft backbone",
    "draft LM head",
    "Markov loop",
    "confidences",
    "results",
)
_EMBEDDING = re.compile(r"embedding.*norm")  # opens a forward pass of a compiled model
_NORM = re.compile(r"rms_norm")  # the last one closes its layers
_ACCEPT = re.compile(r"_block_argmax_kernel|_gather_draft_sampled_kernel")
_DRAFT = re.compile(r"_prepare_dflash_inputs_kernel")
_MATRIX_PRODUCT = re.compile(r"nvjet|gemm|cutlass::Kernel", re.IGNORECASE)
_DRAWN = re.compile(r"_finish_kernel|ArgMax|gumbel")
_CONFIDENCE = re.compile(r"_confidence_kernel|sigmoid")


def parts_of(names: Sequence[str]) -> list[str]:
    """Part of every kernel of one step, in the order in which they ran.

    A part whose edges are missing (nothing was drafted, say) is empty, and what would have been in
    it counts to the part before.
    """
    accept = _first(_ACCEPT, names, 0, len(names))
    forward = _first(_EMBEDDING, names, 0, accept)
    head = _last(_NORM, names, forward, accept) + 1 or accept
    draft = _first(_DRAFT, names, accept, len(names))
    backbone = _first(_EMBEDDING, names, draft, len(names))
    draft_head = _last(_NORM, names, backbone, len(names)) + 1 or len(names)
    markov = _first(_MATRIX_PRODUCT, names, draft_head, len(names)) + 1
    confidence = _last(_DRAWN, names, markov, len(names)) + 1 or markov
    results = _last(_CONFIDENCE, names, confidence, len(names)) + 1 or confidence
    edges = (0, forward, head, accept, draft, backbone, draft_head, markov, confidence, results)
    ends = (*(min(edge, len(names)) for edge in edges[1:]), len(names))
    labels: list[str] = []
    for part, end in zip(PARTS, ends, strict=True):
        labels += [part] * (end - len(labels))
    return labels


def _first(pattern: re.Pattern[str], names: Sequence[str], start: int, stop: int) -> int:
    """Index of the first match in `names[start:stop]`, `stop` if there is none."""
    return next((i for i in range(start, stop) if pattern.search(names[i])), stop)


def _last(pattern: re.Pattern[str], names: Sequence[str], start: int, stop: int) -> int:
    """Index of the last match in `names[start:stop]`, -1 if there is none."""
    return next((i for i in range(stop - 1, start - 1, -1) if pattern.search(names[i])), -1)
