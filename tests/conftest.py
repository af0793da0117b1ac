"""Tests compute with one thread, as the processes of a run do: two busy cores lose more to waiting threads than they win."""

import torch

torch.set_num_threads(1)
