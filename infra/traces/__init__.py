"""Traces for people: which trajectories an iteration has, one rollout as a tree. Nothing is ever written."""
