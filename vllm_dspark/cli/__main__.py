# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_dspark.cli`, for an environment without the console script."""

import sys

from vllm_dspark.cli import main

sys.exit(main())
