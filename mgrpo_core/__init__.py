"""The algorithm of M-GRPO (arXiv:2511.13288): no Prefect, no file, no socket, no clock.

Axis letters, used as suffixes of array names (`reward_N`, `logprobs_BT`):

====== =====================================================================
letter axis
====== =====================================================================
Q      queries of an iteration
K      rollouts of one query
D      sub-agent slots of one rollout after alignment
R      rollouts, over all queries (Q * K)
N      members of one group (K for the main agent, K * D for a sub-agent),
       or members over all groups where a `group_N` says which is which
M      rows of an alignment (slots filled, over all rollouts)
C      cases: what credit would be, each with other rows left out
B      sequences of a micro-batch
T      tokens of a sequence
V      vocabulary
====== =====================================================================

Ragged lists carry no suffix.
"""
