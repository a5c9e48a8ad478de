# SPDX-License-Identifier: Apache-2.0
"""Where verification writes its outcome, and how the outcome is read.

A captured graph writes to the same addresses in every step, while the previous step's outcome may
still be on its way to the host on another stream. Writers therefore get views of the buffers and
readers get copies, and there is no third way out of the class: a reader with a view loses its step
to the next one (SGLang #42465: acceptance 2.42 instead of 3.09 and ranks that part), a writer with
a copy writes into nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vllm_dspark.kernels.greedy_accept import Accepted


class AcceptBuffers:
    """Outcome of the running step's verification.

    Args:
        max_num_reqs: rows of the largest batch.
        gamma: drafts per request.
        device: where the outcome is produced.
    """

    def __init__(self, max_num_reqs: int, gamma: int, device: torch.device) -> None:
        self.__rows, self.__width = max_num_reqs, gamma + 1
        # One block, so that reading is one copy: token ids, then two int32 counts per request.
        words = max_num_reqs * (self.__width + 1)
        self.__block = torch.zeros(words, dtype=torch.int64, device=device)

    @property
    def max_num_reqs(self) -> int:
        return self.__rows

    def accept_buffers(self, num_reqs: int) -> Accepted:
        """Views of the first ``num_reqs`` rows: the only targets of a write, never to be kept by
        a reader.
        """
        return self.__cut(self.__block, num_reqs)

    def read_accept(self, num_reqs: int, readers: Iterable[torch.cuda.Stream] = ()) -> Accepted:
        """Copies of the first ``num_reqs`` rows as the current stream has written them so far.

        Args:
            num_reqs: rows to read.
            readers: streams that will read the copies. Their memory is not given to anybody else
                before the work that is queued on these streams when they are dropped has run.
        """
        block = self.__block.clone()
        if block.is_cuda:
            for stream in readers:
                block.record_stream(stream)
        return self.__cut(block, num_reqs)

    def __cut(self, block: torch.Tensor, num_reqs: int) -> Accepted:
        if not 0 <= num_reqs <= self.__rows:
            raise ValueError(f"num_reqs is {num_reqs}; allowed: 0 to {self.__rows}")
        sampled, counts = block.split([self.__rows * self.__width, self.__rows])
        num_sampled, num_rejected = counts.view(torch.int32).view(2, self.__rows)
        return Accepted(
            sampled.view(self.__rows, self.__width)[:num_reqs],
            num_sampled[:num_reqs],
            num_rejected[:num_reqs],
        )
