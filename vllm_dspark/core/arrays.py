# SPDX-License-Identifier: Apache-2.0
"""Array type aliases of the policy code.

Two layouts occur. The interface speaks request-major `[num_reqs, gamma]`. Inside, blocks are
position-major `[gamma, num_reqs]`: the flat index of that layout is the tie order of the allocation
(position ascending, then request ascending), and products along positions run over contiguous rows.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
Float32Array: TypeAlias = npt.NDArray[np.float32]
Float64Array: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
