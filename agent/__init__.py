"""The agent: unrolls, network, V-trace learner, actors. Knows nothing of tasks or processes."""
