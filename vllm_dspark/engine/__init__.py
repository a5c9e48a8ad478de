# SPDX-License-Identifier: Apache-2.0
"""The seam with vLLM's V2 model runner: the only package that imports vLLM internals.

install    binds our pieces to the names that the runner looks up
session    what belongs to one model runner, found from the objects the host hands us
modes      which verify mode can run here, and why not
draft_model, markov, checkpoint, proposer   the drafting side
assembly   builds the planner from options, host objects and the policy in ``core``
planner    answers the runner's verification calls
decision, slot_table   what was decided for a step; what is known of each request
device_split   lengths that only the device knows
agreement  where a step meets the other ranks of its tensor-parallel group
relay      confidences and accept counts on their way from the device to the planner
graphs     which decode graphs are captured, and which one a plan replays
verifier   the rejection sampler's results: committed counts, cap-accept
accounting, learning, cost_learning   what is done with the outcome of a step
profile, deployment   what steps cost here, and which deployment that is true for
draft_width, context_keys   blocks of several widths; a mended norm on CPUs
"""
