# SPDX-License-Identifier: Apache-2.0
"""One decision per tensor-parallel group, and the proof that there was one.

`block_rows`    what a step publishes, packed into one tensor
`sync_sites`    where ranks may part, and which of these places may go unsynced
`tp_sync`       rank 0's values on every rank, by the protocol that the operator chose
`roll_call`     at start-up: do all ranks run the plugin alike?
`peer_exchange` fixed-size messages between all ranks, every wait bounded
`consensus`     compares what the ranks did, off the critical path; stops a group that disagrees
`decision_log`  debug logs of lengths, survivals and graph keys

Nothing here imports vLLM: a group is whatever has `rank_in_group`, `world_size`, `ranks`,
`device_group` and `cpu_group`.
"""
