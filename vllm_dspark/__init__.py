# SPDX-License-Identifier: Apache-2.0
"""DSpark speculative decoding for vLLM: confidence-scheduled verification as a plugin."""

__version__ = "0.1.0"
