# SPDX-License-Identifier: Apache-2.0
"""Device kernels, one operation per file, each beside its plain reference."""
