# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's V2 model runner on a machine without a GPU, through Triton's interpreter.

The package is the value of the `triton.backends` entry point `cpu`: Triton imports
`vllm_dspark.cpu.compiler` and `vllm_dspark.cpu.driver` whenever it discovers backends, so both are
cheap and never raise.

`host`             does this process interpret its kernels for want of a GPU?
`backend`          the two classes that Triton asks for, and when the entry must not be seen
`compiler/driver`  where Triton looks for them
`ray_key`          lets vLLM's Ray executor place such processes
`interpreter`      fixes for Triton's interpreter, put in place by `interpreter.install()`
"""
