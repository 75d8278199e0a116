"""What the server and the sites have to agree on."""

import torch
from torch import nn

CLIENTS = range(3)  # the ids that the nodes are started with

torch.manual_seed(0)  # the model's first values are the server's to choose, the same each time it is started
model = nn.Linear(64, 10)
