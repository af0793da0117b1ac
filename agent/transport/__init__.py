"""How unrolls travel down to the learner and parameters travel up to the actors."""
