# SPDX-License-Identifier: Apache-2.0
"""The seam with vLLM's V2 model runner: the only package that imports vLLM internals.

install    binds our pieces to the names that the runner looks up
session    what belongs to one model runner, found from the objects the host hands us
modes      which verify mode can run here, and why not
draft_model, markov, checkpoint, proposer   the drafting side
planner    answers the runner's verification calls from the policy in ``core``
relay      confidences and accept counts on their way from the device to the planner
graphs     which decode graphs are captured, and which one a plan replays
verifier   the rejection sampler's results: committed counts, cap-accept
"""
