"""`mgrpo inspect`: an iteration's queries, a query's rollouts, and one rollout as a tree, in a terminal."""
