"""Policies served by vLLM over HTTP: started, loaded, proven, and asked for tokens."""
